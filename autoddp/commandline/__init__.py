"""Floor 5. What a command line means: from its words to the job that is to be launched.

words              whose each word is: autoddp's, torchrun's or the script's; and what the environment adds
parsers            autoddp's and torchrun's, what they refuse, and their help
options            the fields that the words set: the defaults, and the rules for values
place              the node's place in its job, where a cluster tells it
project            what pyproject.toml adds
script             the file that the words name
mode               whether to be torchrun, to launch with a recipe or to tune
rank_count         how many ranks this host starts
saved_recipes      the recipes of a script, and where a new one goes
local_fingerprint  the machine, as recipes are compared with it
environment        what the real job's processes get
watching           when the real job compares gradients with their exact mean
secret_words       words that are not repeated
"""
