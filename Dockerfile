# docker build -t fork . && docker run --rm -it --gpus all -v "$PWD/outputs:/fork/outputs" fork ./scripts/train loader=workers
# Without a GPU leave out --gpus. No --shm-size is needed: workers hand over batches in memfds, not in /dev/shm, which
# only loader=torch and NCCL (several GPUs) use.
FROM python:3.13-slim
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
WORKDIR /fork
# First what .venv needs, so that a change of the code does not install it again.
COPY requirements.txt ./
COPY scripts/ scripts/
RUN sh -c '. scripts/environment.sh' scripts/train
COPY . .
CMD ["./scripts/train"]
