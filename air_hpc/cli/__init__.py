"""The command line: `python -m air_hpc [verb] [overrides]`, one module a verb.

    main        finds the verb, turns errors into messages and exit codes
    options     reads options that stand anywhere between overrides
    output      what goes to stdout and how errors are told
    texts       numbers and times as people read them
    composing   the options and the work that `run` and `plan` share
    site_checks, dry_run, submitted, foreground, summary
                what `run` asks, shows and follows

A verb imports what it needs when it runs, so that `--help` and `plan` stay quick.
"""
