#!/bin/bash
# Trains on several machines of a Slurm cluster. A run that is preempted, or whose time is up, continues by itself.
# Submit it from the repository's root. train.py's arguments come last; sbatch's come first, and replace those below:
#     sbatch --nodes=4 --partition=gpu extras/slurm/train.sh data=packed data.root=/data/pack model=resnet50
#
#SBATCH --job-name=train
# How many machines:
#SBATCH --nodes=2
# One torchrun on each machine, which starts one process per GPU:
#SBATCH --ntasks-per-node=1
# GPUs of each machine to use (with 0, PROCESSES=2 sbatch ... starts two processes on its CPU):
#SBATCH --gpus-per-node=8
# CPU cores of each machine to use, for the training processes and the workers of each:
#SBATCH --cpus-per-task=64
# After this time the run is submitted again, and continues:
#SBATCH --time=24:00:00
# Slurm may preempt the run, and then submits it again itself:
#SBATCH --requeue
# The output of all submissions goes to one file:
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
# Slurm sends SIGUSR1 to this script (B:) 60 s before the time is up. Saving a checkpoint must take less:
#SBATCH --signal=B:USR1@60

# Where the processes meet: the first machine, at a port that another job is unlikely to use.
meeting_point=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 10000))

# When the time is up, all processes save and exit, and this script submits the job again.
trap 'time_is_up=yes; kill -USR1 "$srun"' USR1
# When scancel or Slurm ends the job, the processes get SIGTERM too. Without a trap this script would exit before them.
trap 'is_ended=yes' TERM
# Slurm may preempt the job after a grace time, and signal only the processes. If they exit within that time, Slurm does
# not submit the job again.
is_preempted() { scontrol show job "$SLURM_JOB_ID" | grep -q PreemptTime=2; }

arguments=(
    --nnodes="$SLURM_NNODES"                          # machines
    --nproc-per-node="${PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}" # processes per machine
    --max-restarts=3                                  # how often torchrun may restart the run after a crash
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGUSR1 # torchrun passes these on to its processes
    --rdzv-backend=c10d                               # the processes find each other through torch's server
    --rdzv-endpoint="$meeting_point"                  # which runs there
    --rdzv-id="$SLURM_JOB_ID"                         # and which tells runs apart by the job's id
)
# A job keeps its id when it is submitted again, so it keeps its folder too, where train.resume=auto finds a checkpoint.
# srun does not inherit the number of cores from sbatch: without the option, each machine would use one core.
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" "${PYTHON:-.venv/bin/python}" -m torch.distributed.run \
    "${arguments[@]}" "${TRAIN:-train.py}" hydra.run.dir="outputs/slurm-$SLURM_JOB_ID" "$@" &
srun=$!

# A signal to this script makes `wait` return early, with a code above 128.
while wait "$srun"; code=$?; [ "$code" -gt 128 ]; do :; done
# After scancel the job is not submitted again. After `scontrol requeue`, or without a grace time, Slurm submits it.
if [ "$code" != 0 ] && [ -z "$is_ended" ] && { [ -n "$time_is_up" ] || is_preempted; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
