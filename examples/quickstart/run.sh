#!/bin/sh
# The quickstart from beginning to end; `make demo` calls it. SEED=1 uses other data, weights and samples.
# Arguments are overrides of grpo.yaml: examples/quickstart/run.sh rollout.placement=separate
# Each time it writes to the next free directories: runs/quickstart, runs/quickstart-2, ...
set -eu
cd "$(dirname "$0")/../.."
seed=${SEED:-0}
# What `make install` made, unless another environment has it.
command -v enginehouse >/dev/null || PATH="$PWD/.venv/bin:$PATH"

free() {
    number=1
    directory=$1
    while [ -e "$directory" ]; do
        number=$((number + 1))
        directory=$1-$number
    done
    echo "$directory"
}

python examples/quickstart/make_task.py --seed "$seed"
warm=$(free runs/quickstart-sft)
enginehouse sft --quiet examples/quickstart/sft.yaml train.seed="$seed" run.directory="$warm"
enginehouse train examples/quickstart/grpo.yaml train.seed="$seed" model.path="$warm/model" \
    run.directory="$(free runs/quickstart)" "$@"

echo
echo "To try next:"
if [ -z "${VIRTUAL_ENV:-}" ] && [ "$(command -v enginehouse)" = "$PWD/.venv/bin/enginehouse" ]; then
    echo "  . .venv/bin/activate                                       first, once in a shell: finds enginehouse"
fi
cat <<'END'
  examples/quickstart/run.sh rollout.placement=separate      actor and rollout in processes of their own
  examples/quickstart/run.sh algorithm.advantage.name=rloo   another algorithm
  enginehouse plugins list                                   the engines there are
  examples/quickstart/README.md                              what the files are, and more to change
END
