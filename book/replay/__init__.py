"""L2: replays of recorded runs: the recorded order, with durations from a model.

    backward    Replay, overlap: a backward pass and its all-reduces
    pipeline    pipeline_order, replay_pipeline, bubble: forwards and backwards of stages
    jobs        read_job: who comes last where all ranks meet, by how much, and in which phase
    steps       StepReplay, steps_of: the phases and all-reduces of training steps, on ranks of which some are late
"""
from book.replay.backward import Overlap, Replay, followed, overlap
from book.replay.jobs import RecordedJob, read_job
from book.replay.pipeline import Bubble, bubble, pipeline_order, replay_pipeline
from book.replay.steps import StepReplay, steps_of

__all__ = ["Bubble", "Overlap", "RecordedJob", "Replay", "StepReplay", "bubble", "followed", "overlap",
           "pipeline_order", "read_job", "replay_pipeline", "steps_of"]
