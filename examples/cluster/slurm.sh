#!/usr/bin/env bash
# magicrl on SLURM: one Ray node per task, the head and the run on the first. Submit with
#   sbatch --nodes=4 --gpus-per-node=8 examples/cluster/slurm.sh recipes/mine.toml
# The recipe's [cluster] section says `address = "auto"`. Code, model and run folder are on a file system that all
# nodes share. A requeued job continues from its last checkpoint.
#SBATCH --job-name=magicrl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
set -euo pipefail

recipe=${1:?usage: sbatch slurm.sh RECIPE [magicrl train options]}
shift
port=6379
gpus=${SLURM_GPUS_ON_NODE:-0}
cpus=${SLURM_CPUS_ON_NODE:-$(nproc)}
source "${MAGICRL_VENV:-.venv}/bin/activate"

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${hosts[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')

# --block keeps each daemon in the foreground of its step, so that SLURM ends it with the job
srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" \
  ray start --head --node-ip-address="$address" --port="$port" --num-cpus="$cpus" --num-gpus="$gpus" --block &
sleep 10
for host in "${hosts[@]:1}"; do
  srun --nodes=1 --ntasks=1 --overlap --nodelist="$host" \
    ray start --address="$address:$port" --num-cpus="$cpus" --num-gpus="$gpus" --block &
done
sleep 20

# 120 s before the limit SLURM signals this script. The run finishes its step and writes a checkpoint; the job ends with
# the run's own exit status (143), not with 0, since the training is not done.
srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" \
  bash -c 'magicrl cluster doctor "$1" && exec magicrl train "$@" --resume' magicrl "$recipe" "$@" &
run=$!
trap 'kill -TERM "$run"; wait "$run"; exit $?' TERM
wait "$run"
