"""Recipes: a training run as small functions over a frozen config."""

from pfx.recipe.config import Checkpoint as Checkpoint
from pfx.recipe.config import Data as Data
from pfx.recipe.config import Evaluate as Evaluate
from pfx.recipe.config import Log as Log
from pfx.recipe.config import Model as Model
from pfx.recipe.config import Monitor as Monitor
from pfx.recipe.config import Optimizer as Optimizer
from pfx.recipe.config import Run as Run
from pfx.recipe.config import Train as Train
from pfx.recipe.overrides import ConfigError as ConfigError
