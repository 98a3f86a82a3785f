"""The state of the tuning job: what can happen to it, and what follows from each event.

live_job        the running job as the study uses it
events          what can happen to it
machine         its states, and what each event does
attempt_record  what is known of one start of the script
own_faults      whether a failure is the script's own
journal         every measurement, one line each
restarts        which variables an attempt gets
deadline        when tuning must be over
hang_timeout    when the ranks hang
"""
