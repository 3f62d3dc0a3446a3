"""From evidence to verdict, and the stop agreement. Pure: clock and events come in, words go out.

cause       who ended it, read from Slurm's word after a signal
decide      what is done after an end: the budget and the verdict
detector    which nodes are dead, and which only slow
fitness     which nodes may train, by what their checks said
stragglers  which ranks compute more slowly than the others
stop        how all workers come to stop at one and the same step
"""
