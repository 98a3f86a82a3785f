"""Floor 2. Processes of this host, and what ends them.

children          forks processes, and ends all below this one
signals           what a signal does before the real job
supervisor        the process above a job under `--no-orphans`
polling           waiting with a limit
silence           says what is waited for
standard_streams  puts back what a killed script leaves of the terminal
"""
