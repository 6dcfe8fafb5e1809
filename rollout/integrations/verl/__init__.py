"""Put samebit into verl: `actor_rollout_ref.rollout.name=samebit`.

verl imports this package at the end of its own import, in every process: through its entry points (group
`verl.plugins`), or because `VERL_USE_EXTERNAL_MODULES` names it. Importing it registers samebit with verl; what is
heavy is imported when verl first uses it.

The way through: `plugin` registers, under `names`, for the `versions` it knows; `run_check` looks at a whole run, by
`options`; `patches`, `platform` and `value_heads` change what verl has no hook for. `server` is what samples, `trainer`
what runs in verl's trainer. Imports `models`, the configuration of a worker and `samebit.weight_sync`.
"""

from samebit.rollout.integrations.verl.plugin import load

load()
