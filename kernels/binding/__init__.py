"""Turn a Hugging Face model into a bound model: the same module, computing with samebit's operations.

The way through: `binding` is the door; `plan` walks the modules and finds for each what it gets (`attached`) by
`families`, the list of what is bound exactly (`wrapped`: models with vision around them; `vision`: towers that compute
images). The forwards are in
`modules`, where `residual` lets a sum wait for its norm, and in `causal_lm`, whose logits end in `epilogue`.
`bound_record` checks that modules are still what was bound, `users` knows which objects use one model. `attention`,
`mamba`, `delta`, `short_conv`, `latent` and `experts` are layers of those kinds (`recurrent_plan`: what plans of the
recurrent ones share; `shared_layer`: modules that layers share), `gemma` is what only Gemma 4 has, `layers` are whole
decoder layers in one call, `lora` is adapters, `trainer` is a trainer's side.

Imports `samebit.kernels.ops`, `samebit.kernels.layout` and transformers; knows neither device's kernels.
"""

from samebit.kernels.binding.binding import Binding, bind, binding_of, is_bound
from samebit.kernels.binding.families.family import BindingError
from samebit.kernels.binding.trainer.training import token_logprobs

__all__ = ["Binding", "BindingError", "bind", "binding_of", "is_bound", "token_logprobs"]
