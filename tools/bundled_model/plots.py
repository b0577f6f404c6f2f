"""All story shapes."""

from typing import Final

from bundled_model import plots_of_friendship, plots_of_trouble
from bundled_model.plot import Plot

PLOTS: Final[tuple[Plot, ...]] = (
    plots_of_trouble.LOST,
    plots_of_friendship.FRIEND,
    plots_of_trouble.STORM,
    plots_of_trouble.BUILD,
    plots_of_trouble.FEAR,
    plots_of_friendship.GIFT,
    plots_of_friendship.NOISE,
    plots_of_friendship.SHARE,
    plots_of_friendship.RACE,
    plots_of_trouble.LEARN,
    plots_of_trouble.TREASURE,
)
