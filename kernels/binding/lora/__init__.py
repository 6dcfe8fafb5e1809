"""Bind low-rank adapters of peft (LoRA on linear layers), and let the context of a call choose among them.

The way through: `peft_model` tells what is peft's; `plan` finds the adapters of a model and refuses what is not exact;
`forwards` has what their modules compute; `loaded` makes adapters that live beside a model. Imports `ops`, `layout`
and, of `binding`, `attached`, `binding`, `bound_record`, `families` and `wrapped`. peft is imported by nothing here:
without a peft model in the process it is not needed.
"""
