"""Floor 4. A recipe's settings as lines for the user's own code, for those who start their job without autoddp.

print(lines_for(load("train.autoddp.toml"), "train.autoddp.toml", "ddp").text)

settings    which settings a form of code can say, and what is to be done by hand about the others
forms       the forms: DDP's constructor, Accelerate, Lightning, Transformers' Trainer, environment variables, Slurm
"""

from autoddp.own_code.forms import FORMS, Lines, lines_for

__all__ = ["FORMS", "Lines", "lines_for"]
