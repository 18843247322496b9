#!/bin/sh
# The quickstart from beginning to end; `make demo` calls it. SEED=1 uses other data, weights and samples.
# Arguments are overrides of grpo.yaml: examples/quickstart/run.sh rollout.placement=separate
set -eu
cd "$(dirname "$0")/../.."
seed=${SEED:-0}

python examples/quickstart/make_task.py --seed "$seed"
enginehouse sft --quiet examples/quickstart/sft.yaml train.seed="$seed"
enginehouse train examples/quickstart/grpo.yaml train.seed="$seed" "$@"

cat <<'END'

To try next:
  examples/quickstart/run.sh rollout.placement=separate      actor and rollout in processes of their own
  examples/quickstart/run.sh algorithm.advantage.name=rloo   another algorithm
  enginehouse plugins list                                   the engines there are
  examples/quickstart/README.md                              what the files are, and more to change
END
