"""The parts of `benchmarks/search.py`: what is trained, what competes, how compute is counted.

    task.py        what a task is, its grid and its starting points; tasks/ holds one file a task
    contender.py   what a contender is; contenders/ holds one file a contender
    meter.py       compute: forward and backward example-passes, counted at the model
    cell.py        one run: a contender on a task from a starting point with a seed, and its file
    sweep.py       the best fixed setting of a grid: the oracle, and the centre of the starting points
    found.py       which tasks and contenders there are
    runner.py      runs the cells that have no file yet
    statistics.py  intervals, regrets, ranks
    outcome.py     all runs in one place; report.py and pictures.py make Markdown, CSV and plots of it

A file put into tasks/ or contenders/ that sets `TASK` or `CONTENDER` takes part; nothing else names it.
"""
