"""Floor 7. The tuning job: attempts, each of which starts the script once, and the study that they serve.

tune            attempts in one thread, the study in another
preparation     what tuning needs before it begins
limits          when an attempt must be stopped
keeper          the process that starts attempts and ends them
live_job        the running job as the study uses it
job_events      what can happen to it
job_machine     its states, and what each event does
attempt_record  what is known of one start of the script
own_faults      whether a failure is the script's own
journal         every measurement, one line each
resuming        goes on with a run that was cut off
isolating       which isolation an attempt gets
restarts        which variables an attempt gets
env_screening   a short benchmark of variables before that
deadline        when tuning must be over
rank_states     where the ranks are, and which of them wait
hang_timeout    when they hang
communication   scripts that communicate without DDP
starts/         tunes such a script by starting it once for each measurement
bench_job       the job of `autoddp bench`
"""
