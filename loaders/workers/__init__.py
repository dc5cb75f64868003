"""The engine behind WorkerLoader: tasks, the dispatcher, and its pools of processes, of threads, or of the caller."""
