//! A Slurm job array that does a sweep's runs, one task each.

use std::fmt::Write;
use std::path::Path;

use longwall_config::shell_quoted;

use super::execute::is_done;
use super::{Plan, SweepError};

impl Plan {
    /// The script of a job array with one task for each run that is not trained and evaluated yet; `None` if there
    /// is no such run. A task calls `longwall sweep
    /// FILE --only INDEX` with the binary `exe`, in the folder `folder`, where the sweep was planned.
    ///
    /// # Errors
    /// When a run folder cannot be read.
    pub fn slurm_script(
        &self,
        file: &Path,
        exe: &Path,
        folder: &Path,
    ) -> Result<Option<String>, SweepError> {
        let mut left = Vec::new();
        for (at, run) in self.runs.iter().enumerate() {
            if !is_done(self, run)? {
                left.push(at);
            }
        }
        if left.is_empty() {
            return Ok(None);
        }
        let name = &self.sweep.name;
        let [file, exe, folder, logs] = [file, exe, folder, &self.sweep.dir()].map(shell_quoted);
        let mut script = String::new();
        let _ = write!(
            script,
            "#!/bin/bash\n\
             # {} of the {} runs of the sweep {name}. Set the partition, the time and the resources of your cluster.\n\
             # A task that is stopped writes a checkpoint; submit the script again to go on. When all have ended:\n\
             #   {exe} sweep {file}\n\
             # writes the table of results and the pictures.\n\
             #SBATCH --job-name={}\n\
             #SBATCH --array={}\n\
             #SBATCH --ntasks=1\n\
             #SBATCH --gpus-per-task=1\n\
             #SBATCH --cpus-per-task=8\n\
             #SBATCH --time=24:00:00\n\
             #SBATCH --signal=TERM@120\n\
             #SBATCH --output={logs}/slurm-%A_%a.log\n\
             set -euo pipefail\n\
             cd {folder}\n\
             srun {exe} sweep {file} --only \"$SLURM_ARRAY_TASK_ID\"\n",
            left.len(),
            self.runs.len(),
            name.replace(char::is_whitespace, "_"),
            ranges(&left),
        );
        Ok(Some(script))
    }
}

/// Ascending numbers, with runs as ranges: `0-4,6`.
fn ranges(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run[0].to_string(),
    });
    runs.collect::<Vec<_>>().join(",")
}
