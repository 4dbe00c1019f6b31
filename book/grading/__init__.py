"""L4: labs as course assignments. `python -m book.grading release labs -o student` makes the student copies."""
