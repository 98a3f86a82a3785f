"""Floor 4. What a tuning run leaves on the disk.

folder         a run's folder, and the removal of what earlier runs left
latest         a link to the newest run
usual_folders  where runs and recipes go
owner          who made a folder, and whether that launcher still runs
removal        removes a folder, and nothing outside it
rank_logs      keeps the ranks' logs small
nccl_logs      NCCL's own logs
"""
