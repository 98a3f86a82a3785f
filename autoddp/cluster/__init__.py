"""Floor 1. What a cluster tells a launcher by variables: the nodes, which of them this is, and the master.

base          the questions, which every platform answers
choice        the platforms that are here, the innermost first
node_list     the first name in a list of nodes as Slurm writes it
kubeflow      Kubeflow's TrainJob and PyTorchJob
torchx        TorchX
skypilot      SkyPilot
sagemaker     Amazon SageMaker
azure_ml      Azure Machine Learning
pai_dlc       Alibaba's PAI-DLC
model_arts    Huawei's ModelArts
volcano       Volcano
hyperpod_eks  SageMaker HyperPod on EKS
jobset        an indexed job of Kubernetes, as JobSet makes it
job_files     the files that submit a job
slurm         Slurm, also under AWS ParallelCluster and SageMaker HyperPod
mpi           mpirun, where it starts several processes on one node
single_ranks  Composer and Ray Train, which start each rank themselves
unknown       others that start one of several processes
"""
