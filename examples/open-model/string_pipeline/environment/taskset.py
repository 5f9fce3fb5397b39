import random

import verifiers.v1 as vf
from tools import Data, State, Tools, parse_answer, sample

LO, HI = 2, 4


class TaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Task(vf.Task[Data, State, TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Tools(config.tools)]

    @vf.reward(weight=1.0)
    async def correct(self, trace):
        return float(parse_answer(trace.last_reply) == self.data.answer)


class TasksetConfig(vf.TasksetConfig):
    num_rows: int = 512
    seed: int = 0
    task: TaskConfig = TaskConfig()


class Taskset(vf.Taskset[Task, TasksetConfig]):
    def load(self):
        rng = random.Random(self.config.seed)
        for _ in range(self.config.num_rows):
            yield Task(sample(rng, LO, HI), self.config.task)
