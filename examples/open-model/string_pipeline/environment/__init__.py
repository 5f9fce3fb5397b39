from environment.taskset import Taskset

__all__ = ["Taskset"]
