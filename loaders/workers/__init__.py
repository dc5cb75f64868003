"""The engine behind WorkerLoader: tasks, the dispatcher, and pools of processes, threads, or the calling thread."""
