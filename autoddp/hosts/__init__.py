"""Floor 6. The launchers of a job on several hosts.

agreement   their meeting before the job
together    how they make the same attempts
presence    which of them are still running
late_hosts  a host that comes when the others have met
"""
