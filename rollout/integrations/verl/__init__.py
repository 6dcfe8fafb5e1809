"""Put samebit into verl: `actor_rollout_ref.rollout.name=samebit`.

verl imports this package at the end of its own import, in every process: through its entry points (group
`verl.plugins`), or because `VERL_USE_EXTERNAL_MODULES` names it. Importing it registers samebit with verl; what is
heavy is imported when verl first uses it.
"""

from samebit.rollout.integrations.verl.plugin import load

load()
