"""Bind low-rank adapters of peft (LoRA on linear layers), and let the context of a call choose among them.

`peft_model` tells what is peft's; `plan` finds the adapters of a model and refuses what is not exact; `forwards` has
what their modules compute. peft is imported by nothing here: without a peft model in the process it is not needed.
"""
