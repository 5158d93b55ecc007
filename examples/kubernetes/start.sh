#!/usr/bin/env bash
# What each pod of pytorchjob.yaml runs: a recipe, and then the exit code that says whether to start the pods again.
#   bash examples/kubernetes/start.sh llama3.1-8b [further flags]
# torchrun returns 1 whatever happened. $SAVE/exit.json has the cause's code, and the operator reads ours
# (restartPolicy: ExitCode): 1 to 127 fail the job at once, from 128 on the pod is started again.
#   0    the run is done, or somebody stopped it with `touch $SAVE/stop`. It then stays stopped: a pod that is started
#        again finds that in exit.json and ends. Remove exit.json to go on from the checkpoint.
#   64, 65, 70, 71   flags, data, NaN, memory: another start would end in the same way.
#   143  everything else: a lost machine, storage, a pod that is taken away (pytorchjob.yaml marks that in $SAVE/preempted).
#   1    ATTEMPTS starts in a row (default 5) have brought no new checkpoint.
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${SAVE:?folder for checkpoints, shared by all pods}" "${PET_NODE_RANK:?number of this pod, which the operator sets}"
attempts=${ATTEMPTS:-5}
start_again=143

code_of_the_end() { sed -n 's/^{"code": \([0-9]*\).*/\1/p' "$SAVE/exit.json" 2>/dev/null || true; }

if [ "$(code_of_the_end)" = 75 ] && [ ! -e "$SAVE/preempted" ]; then
    echo "The run was stopped on request ($SAVE/exit.json) and stays stopped; remove that file to go on."
    exit 0
fi
if [ "$PET_NODE_RANK" = 0 ]; then
    mkdir -p "$SAVE"
    newest=$(cat "$SAVE/latest_checkpointed_iteration.txt" 2>/dev/null || echo none)
    read -r counted since < <(cat "$SAVE/attempts" 2>/dev/null || echo "0 $newest") || true
    if [ "$since" != "$newest" ]; then counted=0; fi
    if ((counted >= attempts)); then
        rm -f "$SAVE/attempts" # the next job counts anew
        echo "error: $attempts starts have brought no checkpoint after iteration $newest; look at the pods' logs" >&2
        exit 1
    fi
    echo "$((counted + 1)) $newest" >"$SAVE/attempts"
    # What an earlier run left would stop this one.
    rm -f "$SAVE/stop" "$SAVE/exit.json" "$SAVE/preempted"
fi

export NODES=$PET_NNODES NODE_RANK=$PET_NODE_RANK GPUS=$PET_NPROC_PER_NODE
bash examples/recipes/run.sh "$@" &
run=$!
trap 'kill -TERM "$run" 2>/dev/null || true' TERM # this shell is the container's first process, and gets the signal alone
code=0
wait "$run" || code=$?
while kill -0 "$run" 2>/dev/null; do # else the signal ended the wait, and not the run
    code=0
    wait "$run" || code=$?
done

if [ "$code" != 0 ]; then
    case "$(code_of_the_end)" in
        64 | 65 | 70 | 71) code=$(code_of_the_end) ;;
        75) if [ -e "$SAVE/preempted" ]; then code=$start_again; else code=0; fi ;;
        *) code=$start_again ;;
    esac
fi
if ((code < 128)) && [ "$PET_NODE_RANK" = 0 ]; then rm -f "$SAVE/attempts"; fi
exit "$code"
