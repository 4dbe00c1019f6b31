"""L0: schedules as plain data: what every rank does, in which order, before anything runs.

    moves     Move, Schedule: who sends which chunk to whom at which step
    actions   Action, PipelineSchedule: which forward or backward of which micro-batch a rank runs next
"""
from book.schedule.actions import KINDS, Action, PipelineSchedule, Work, taker_of
from book.schedule.moves import OPS, Move, Schedule, ScheduleError, check_counts, contents_fault

__all__ = ["KINDS", "OPS", "Action", "Move", "PipelineSchedule", "Schedule", "ScheduleError", "Work",
           "check_counts", "contents_fault", "taker_of"]
