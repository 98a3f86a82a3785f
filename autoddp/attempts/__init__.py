"""Floor 7. The tuning job: attempts, each of which starts the script once, and the study that they serve.

tune            attempts in one thread, the study in another
preparation     what tuning needs before it begins
limits          when an attempt must be stopped
keeper          the process that starts attempts and ends them
job/            the running job: its states, and what each event does
resuming        goes on with a run that was cut off
isolating       which isolation an attempt gets
env_screening   a short benchmark of variables before tuning
rank_states     where the ranks are, and which of them wait
communication   scripts that communicate without DDP
starts/         tunes such a script by starting it once for each measurement
bench_job       the job of `autoddp bench`
"""
