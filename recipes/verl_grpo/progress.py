"""Tell what verl is doing before its first step, from its log."""

from pathlib import Path

STAGES = {
    "ray init kwargs": "the options are checked; Ray starts",
    "Started a local Ray instance": "Ray runs; the process of the trainer's loop loads verl",
    "dataset len:": "the data is read; the process of the trainer's model loads verl",
    "Before FSDP": "the model is loaded; its FSDP engine and the rollout servers are built",
    "LLMServerManager:": "the rollout servers are there; reward and agent loops start",
    "Creating file logger": "the weights go to the servers; validation or the first step is sampled",
    "Initial validation metrics": "the first validation is over; the first step is sampled",
}
"""Lists words of verl's log, in the order in which they come, and what has begun when they stand there."""


class Progress:
    """Follows the stages that a run has reached. A log that lacks the words of one still tells the later ones."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read = 0
        self._ahead = list(STAGES)

    def reached(self) -> list[str]:
        """Return what has begun since the last call."""
        lines = self._new_lines()
        found = [words for words in self._ahead if any(words in line for line in lines)]
        if found:
            self._ahead = self._ahead[self._ahead.index(found[-1]) + 1 :]
        return [STAGES[words] for words in found]

    def _new_lines(self) -> list[str]:
        """Return only whole lines, so that none is cut in the middle of a word."""
        if not self._log.exists():
            return []
        with self._log.open("rb") as log:
            log.seek(self._read)
            content = log.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace").splitlines()
