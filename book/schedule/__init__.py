"""L0: schedules as plain data: what every rank does, in which order, before anything runs.

    moves     Schedule: who sends which chunk to whom at which step
    phases    Move; Phase: loops over steps and ranks that say what each sends, run when the moves are asked for
    actions   Action, PipelineSchedule: which forward or backward of which micro-batch a rank runs next
"""
from book.schedule.actions import KINDS, Action, PipelineSchedule, Work, taker_of
from book.schedule.moves import Schedule, check_counts, contents_fault
from book.schedule.phases import (OPS, ChunkRange, Loops, Move, Phase, Phases, Round, ScheduleError, every, moves_of,
                                  phase)

__all__ = ["KINDS", "OPS", "Action", "ChunkRange", "Loops", "Move", "Phase", "Phases", "PipelineSchedule", "Round",
           "Schedule", "ScheduleError", "Work", "check_counts", "contents_fault", "every", "moves_of", "phase",
           "taker_of"]
