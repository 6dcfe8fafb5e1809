"""OpenAI's endpoints: what may be asked (`requests`, `prompts`, `sampling`), what is answered (`completions`, `chat`,
`logprobs`, `answers`), and what a conversation needs (`tools`, `sessions`)."""
