"""L2: replays of recorded runs: the recorded order, with durations from a model.

    backward    Replay, overlap: a backward pass and its all-reduces
    pipeline    pipeline_order, replay_pipeline, bubble: forwards and backwards of stages
"""
from book.replay.backward import Overlap, Replay, followed, overlap
from book.replay.pipeline import Bubble, bubble, pipeline_order, replay_pipeline

__all__ = ["Bubble", "Overlap", "Replay", "bubble", "followed", "overlap", "pipeline_order", "replay_pipeline"]
