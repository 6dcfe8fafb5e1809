"""Turn a Hugging Face model into a bound model: the same module, computing with samebit's operations.

`binding` is the door; `plan` finds each module's forward by `families`; the forwards are in `modules`, `mamba_mixer`,
`causal_lm`; `training` and `logprob_head` are the trainer's side.
"""

from samebit.kernels.binding.binding import Binding, bind, binding_of, is_bound
from samebit.kernels.binding.families import BindingError
from samebit.kernels.binding.trainer.training import token_logprobs

__all__ = ["Binding", "BindingError", "bind", "binding_of", "is_bound", "token_logprobs"]
