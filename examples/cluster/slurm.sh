#!/bin/bash
# One run over all nodes of a Slurm job:
#
#   sbatch --export=ALL,RUN=/shared/runs/first examples/cluster/slurm.sh run.yaml [section.key=value ...]
#
# Python of the shell that calls sbatch is used on every node: activate its environment first, on a file system that
# all nodes see. Shortly before its time is up (USR1) the run saves what it has, and the job is queued again and goes on.
#   scancel --batch --signal=TERM JOBID     save and end
#   scancel JOBID                           end: Ray's processes get the signal too, and the run can save nothing
#
#SBATCH --job-name=enginehouse
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@240
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=enginehouse-%j.log

set -euo pipefail

config=${1:?"sbatch slurm.sh run.yaml [section.key=value ...]"}
overrides=("${@:2}")
run=${RUN:-runs/$SLURM_JOB_ID}
grace=${GRACE_SECONDS:-120}         # what the run may take to save; --signal above leaves two minutes more, to end Ray
join_seconds=${JOIN_SECONDS:-300}   # what the nodes may take to start Ray
cpus=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}

mapfile -t names < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${names[0]}                    # this script runs there
ip=${HEAD_IP:-$(getent ahostsv4 "$head" | awk 'NR == 1 {print $1}')}
port=$((20000 + SLURM_JOB_ID % 10000))
ray_dir=/tmp/ray-$SLURM_JOB_ID      # its own: another user's /tmp/ray cannot be written to

# Only who has the job's token may use its Ray.
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0  # nothing is left to drain when nodes end; Ray 2.60 would wait 30 s for it

asked="" child="" steps=()

# shellcheck disable=SC2329  # by traps
signalled() {
    asked=$1
    [[ -z $child ]] || kill -TERM "$child" 2> /dev/null || true
}
trap 'signalled TERM' TERM
trap 'signalled USR1' USR1

attend() {  # runs a program, hands signals on to it, and returns its exit code
    [[ -z $asked ]] || return 143
    "$@" &
    child=$!
    local code=0
    wait "$child" || code=$?
    while kill -0 "$child" 2> /dev/null; do  # `wait` was ended by a signal, and the program was not
        wait "$child" || true
    done
    wait "$child" && code=0 || code=$?
    child=""
    return "$code"
}

# One process a node; Slurm 22.05 and later wants to be told its CPUs.
per_node=(srun --overlap --ntasks-per-node=1 --cpus-per-task="$cpus")

# shellcheck disable=SC2016  # the node's own shell reads it
keep_logs='[[ -d $2/session_latest ]] && mkdir -p "$1" && cp -rL "$2"/session_latest/logs "$1/$SLURMD_NODENAME"'

finish() {
    code=$?
    if (( ${#steps[@]} > 0 )); then
        # What Ray and all workers logged would be lost with the nodes' /tmp.
        timeout 30 "${per_node[@]}" --nodes="${#names[@]}" --ntasks="${#names[@]}" \
            bash -c "$keep_logs" keep "$run-ray-logs/$SLURM_JOB_ID" "$ray_dir" ||
            echo "not all logs of Ray could be kept in $run-ray-logs" >&2
        kill "${steps[@]}" 2> /dev/null || true
        wait "${steps[@]}" || true
    fi
    if [[ $asked == USR1 && $code == 143 ]]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$code"
}
trap finish EXIT

# Ray gives its processes 30 s to come up. Where Python is loaded from a busy file system the first try is often too slow.
# shellcheck disable=SC2016  # the node's own shell reads it
tries='for _ in 1 2 3; do "${@:2}" && exit; code=$?; (( SECONDS < $1 )) || break; done; exit "$code"'

"${per_node[@]}" --nodes=1 --ntasks=1 --nodelist="$head" bash -c "$tries" tries "$join_seconds" \
    ray start --block --head --node-ip-address="$ip" --port="$port" --num-cpus="$cpus" --temp-dir="$ray_dir" &
steps+=($!)

# Waits until so many nodes are there, unless the processes that start them end before.
joined='
import os, socket, sys, time, ray
host, port, nodes, seconds, *steps = sys.argv[1:]
until = time.monotonic() + float(seconds)
def wait_for(condition, what):
    while not condition():
        if time.monotonic() > until:
            sys.exit(f"waited {seconds} s in vain for {what} of Ray at {host}:{port}")
        if not all(os.path.exists(f"/proc/{pid}") for pid in steps):
            sys.exit(f"a node could not start Ray at {host}:{port}: what it said is above")
        time.sleep(0.5)
wait_for(lambda: socket.socket().connect_ex((host, int(port))) == 0, "the head node")
def here():
    try:
        ray.is_initialized() or ray.init(f"{host}:{port}", log_to_driver=False, logging_level="ERROR")
    except ConnectionError:  # the head node is slow
        return 0
    return sum(node["Alive"] for node in ray.nodes())
if nodes != "1":
    wait_for(lambda: here() >= int(nodes), f"{nodes} nodes")
'
attend python -c "$joined" "$ip" "$port" 1 "$join_seconds" "${steps[@]}"
if (( ${#names[@]} > 1 )); then
    others=$(( ${#names[@]} - 1 ))
    "${per_node[@]}" --nodes="$others" --ntasks="$others" --exclude="$head" bash -c "$tries" tries "$join_seconds" \
        ray start --block --address="$ip:$port" --num-cpus="$cpus" --temp-dir="$ray_dir" &
    steps+=($!)
    attend python -c "$joined" "$ip" "$port" "${#names[@]}" "$join_seconds" "${steps[@]}"
fi

again=()
if compgen -G "$run/checkpoints/step-*" > /dev/null; then
    again=(--resume)
elif (( ${SLURM_RESTART_COUNT:-0} > 0 )); then
    again=(run.overwrite=true)  # ended before there was a checkpoint: there is nothing to go on from
fi

attend enginehouse train "$config" cluster.address="$ip:$port" run.directory="$run" run.grace_seconds="$grace" \
    "${overrides[@]}" "${again[@]}"
