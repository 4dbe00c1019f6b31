"""L0: schedules as plain data: what every rank does, in which order, before anything runs.

    moves     Schedule: who sends which chunk to whom at which step
    phases    Move; Phase: steps that follow a rule, without a list of their moves
    actions   Action, PipelineSchedule: which forward or backward of which micro-batch a rank runs next
"""
from book.schedule.actions import KINDS, Action, PipelineSchedule, Work, taker_of
from book.schedule.moves import Schedule, ScheduleError, check_counts, contents_fault
from book.schedule.phases import OPS, Move, Phase, Phases, Round, moves_of

__all__ = ["KINDS", "OPS", "Action", "Move", "Phase", "Phases", "PipelineSchedule", "Round", "Schedule",
           "ScheduleError", "Work", "check_counts", "contents_fault", "moves_of", "taker_of"]
