#!/bin/bash
# Trains on several machines of a Slurm cluster. A run that is preempted, or whose time is up, goes on by itself.
# Submit it from the repository's root. train.py's arguments come last; sbatch's come first, and replace those below:
#     sbatch --nodes=4 --partition=gpu scripts/slurm_train.sh data=packed data.root=/data/pack model=resnet50
#
#SBATCH --job-name=train
# How many machines:
#SBATCH --nodes=2
# One torchrun on each of them, which starts one process for each GPU:
#SBATCH --ntasks-per-node=1
# How many GPUs each machine gives (0: PROCESSES=2 sbatch ... starts two processes on its CPU):
#SBATCH --gpus-per-node=8
# How many CPU cores each machine gives, for the training processes and loader.num_workers of each:
#SBATCH --cpus-per-task=64
# After this time the run is submitted again, and continues:
#SBATCH --time=24:00:00
# Slurm may take the machines away, and then submits the run again itself:
#SBATCH --requeue
# What is printed, in one file for all submissions:
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
# 60 seconds before its time is up, this script (B:) gets SIGUSR1. Saving a checkpoint must take less time:
#SBATCH --signal=B:USR1@60

# Where the processes meet: the first machine, at a port that another job there hardly has.
meeting_point=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 10000))

# When the time is up: tell all processes to save and exit, and remember to submit the job again.
trap 'time_is_up=yes; kill -USR1 "$srun"' USR1
# When scancel or Slurm ends the job, all processes are told too. Without a trap this script would exit before them.
trap 'is_ended=yes' TERM
# Another job may push this one out after a grace time, in which only the processes are told. If they exit within it,
# Slurm does not submit the job again.
is_preempted() { scontrol show job "$SLURM_JOB_ID" | grep -q PreemptTime=2; }

arguments=(
    --nnodes="$SLURM_NNODES"                          # machines
    --nproc-per-node="${PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}" # processes on each of them
    --max-restarts=3                                  # how often the run may go on after a process has crashed
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGUSR1 # that torchrun passes on to its processes before it exits
    --rdzv-backend=c10d                               # the processes find each other through torch's own server
    --rdzv-endpoint="$meeting_point"                  # which runs there
    --rdzv-id="$SLURM_JOB_ID"                         # and tells runs apart by the job's id
)
# A job keeps its id when it is submitted again, so it keeps its folder too, where train.resume=auto finds a checkpoint.
# srun does not take over the number of cores from sbatch. Without it each machine would give one.
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${PYTHON:-.venv/bin/python}" -m torch.distributed.run \
    "${arguments[@]}" "${TRAIN:-train.py}" hydra.run.dir="outputs/slurm-$SLURM_JOB_ID" "$@" &
srun=$!

# A signal to this script ends `wait` early, with a code above 128.
code=255
while [ "$code" -gt 128 ]; do
    wait "$srun"
    code=$?
done
# After scancel nothing is submitted again; after `scontrol requeue`, or without a grace time, Slurm does that itself.
if [ "$code" != 0 ] && [ -z "$is_ended" ] && { [ -n "$time_is_up" ] || is_preempted; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
