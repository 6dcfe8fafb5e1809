"""Keep the policy as it was before the last update, to compare tokens with that were sampled under it."""

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from samebit.kernels import token_logprobs
from samebit.recipes.mismatch import MismatchError
from samebit.recipes.trajectory import Batch
from samebit.weight_sync import apply_weights


class PreviousPolicy:
    """Holds a second copy of the policy's weights, one version behind."""

    def __init__(self, policy: PreTrainedModel) -> None:
        self._module = copy.deepcopy(policy)
        self._version: int | None = None

    def keep(self, policy: PreTrainedModel, version: int) -> None:
        """Keep a copy of the policy before it is updated; `version` is its version now."""
        apply_weights(self._module, policy)
        self._version = version

    @torch.no_grad()
    def logprobs(self, batch: Batch, version: int, temperature: float) -> Tensor:
        """Return the log-probabilities under the weights of `version`, [B, T-1]."""
        if version != self._version:
            raise MismatchError(
                f"a token was sampled under version {version} of the weights; kept is version {self._version}"
            )
        return token_logprobs(
            self._module, batch.input_ids, attention_mask=batch.attention_mask, temperature=temperature
        )
