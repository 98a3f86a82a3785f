"""Floor 3. What lies between the hosts of a job: interfaces, clocks and meeting places.

gathering            brings the launchers of all hosts to the job's endpoint
interface_selection  by which address, and how fast, each host can be reached
interface_probe      the port that is tried for that
own_network          what was chosen for this host
clock                by how much the hosts' clocks differ
loopback             a rendezvous that no other host can reach
"""
