"""The bake-off: many training runs that differ in their precision policy, compared with noise in mind.

`python -m eval.bakeoff run | report` (`__main__`), started in the repository's folder. The way of a result:

    grid           which runs there are: a YAML file as a list of specs with ids
    text           what they read
    runner         the runs that have no line yet, shared out among worker processes
    one_run        one run: trained, scored, its line
    training       the training of one run
    lines          what a file of lines holds
    gaps           each run's gap to the BF16 run of its seed
    contenders     the runs of one spec over its seeds
    significance   one against another: a difference and its test
    linear_model   gaps with the effects of seeds taken out
    ranking        who is ahead of whom, beyond noise
    plans          how plans moved
    tables, report, figures   what people look at

`python -m eval.bakeoff.forks text | run | report` compares contenders that train on from one checkpoint:

    fork_cells     contenders, forks, and how long they train
    fork_recipe    which of them there are: a YAML file, checked
    fork_text      the tokens that they see, in one file
    fork_base      a model in training, and the base up to its checkpoints
    fork_run       one fork of one contender
    weight_means   the mean of the weights over some steps
    fork_workers   the forks that have no line yet, shared out among worker processes
    fork_pace      how many they are, and how long they take
    fork_lines     what a file of lines holds: pairs and differences
    fork_statistics, mixed_model   intervals, tests and their power
    fork_tables, fork_figures, fork_report   what people look at
"""
