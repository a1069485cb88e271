//! The environment variables that say which rank a process is.

use std::os::fd::RawFd;

use super::World;

/// What the environment says of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Environment {
    /// The ranks.
    pub world: World,
    /// This rank's place among those of its machine: the number of its GPU.
    pub local_rank: usize,
    /// The machine of rank 0, as name or number.
    pub address: String,
    /// The port that rank 0 listens on.
    pub port: u16,
    /// Rank 0's listener at that port, if the process that launched it has made one: no other program can take the port
    /// in between.
    pub listener: Option<RawFd>,
}

/// Why the variables say nothing sensible.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvironmentError {
    /// A variable is missing that belongs to another.
    #[error(
        "{set} is set, but {missing} is not\n  hint: several ranks need RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them, or Slurm's, Open MPI's or MPICH's variables with MASTER_ADDR and MASTER_PORT; for a run of its own, unset {set}"
    )]
    Missing {
        /// The variable that is set.
        set: &'static str,
        /// The one that is not.
        missing: String,
    },
    /// A variable has an impossible value.
    #[error("{name} is {value:?}; allowed: {allowed}")]
    Value {
        /// The variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it may be.
        allowed: String,
    },
}

/// The names of rank, number of ranks, and rank on the machine, as torchrun and most launchers set them.
const PLAIN: [&str; 3] = ["RANK", "WORLD_SIZE", "LOCAL_RANK"];

/// Those of mpirun: Open MPI's, then MPICH's and Intel MPI's.
const MPI: [[&str; 3]; 2] = [
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],
];

/// Slurm's.
const SLURM: [&str; 3] = ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"];

/// The descriptor of rank 0's listener.
const LISTENER: &str = "LONGWALL_LISTENER";

impl Environment {
    /// Reads the variables of this process. `None` if it is the only rank.
    ///
    /// Slurm's and mpirun's count only if `MASTER_ADDR` is set, since a batch script and independent runs have them too;
    /// Slurm's only if there are none of mpirun, which a batch script may call.
    ///
    /// # Errors
    /// When some are missing or impossible.
    pub fn read() -> Result<Option<Self>, EnvironmentError> {
        Self::of(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn of(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>, EnvironmentError> {
        let number = |name: &'static str, below: usize| {
            let Some(value) = variable(name) else { return Ok(None) };
            match value.parse().ok().filter(|&number| number < below) {
                Some(number) => Ok(Some(number)),
                None if below == usize::MAX => {
                    Err(EnvironmentError::Value { name, value, allowed: "a whole number".into() })
                }
                None => {
                    let allowed = format!("0 to {}", below.saturating_sub(1));
                    Err(EnvironmentError::Value { name, value, allowed })
                }
            }
        };
        let names = match variable(PLAIN[0]).or_else(|| variable(PLAIN[1])) {
            Some(_) => PLAIN,
            None => {
                let all = |names: &[&str; 3]| names.iter().all(|name| variable(name).is_some());
                MPI.into_iter().find(all).unwrap_or(SLURM)
            }
        };
        let [rank_name, size_name, local_name] = names;
        let missing =
            |set, missing: &str| EnvironmentError::Missing { set, missing: missing.into() };
        let size = match (number(size_name, usize::MAX)?, variable(rank_name)) {
            (None, None) => return Ok(None),
            (None, Some(_)) => return Err(missing(rank_name, size_name)),
            (Some(0), _) => {
                let allowed = "1 or more".into();
                return Err(EnvironmentError::Value {
                    name: size_name,
                    value: "0".into(),
                    allowed,
                });
            }
            (Some(1), _) => return Ok(None),
            (Some(size), _) => size,
        };
        let Some(address) = variable("MASTER_ADDR") else {
            if names != PLAIN {
                tracing::warn!(
                    "{size_name} is {size}, but MASTER_ADDR is not set: this process trains on its own"
                );
                return Ok(None);
            }
            return Err(missing(size_name, "MASTER_ADDR"));
        };
        let rank = number(rank_name, size)?.ok_or_else(|| missing(size_name, rank_name))?;
        let local_rank =
            number(local_name, usize::MAX)?.ok_or_else(|| missing(size_name, local_name))?;
        let port = variable("MASTER_PORT").ok_or_else(|| missing(size_name, "MASTER_PORT"))?;
        let port = port.parse().ok().filter(|&port| port > 0).ok_or_else(|| {
            let allowed = "1 to 65535".into();
            EnvironmentError::Value { name: "MASTER_PORT", value: port.clone(), allowed }
        })?;
        let listener = variable(LISTENER).and_then(|descriptor| descriptor.parse().ok());
        let listener = listener.filter(|descriptor| *descriptor >= 0);
        let world = World { rank, size };
        Ok(Some(Environment { world, local_rank, address, port, listener }))
    }

    /// The variables of a process that [`Environment::read`] reads as this.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let [rank, size, local_rank] = PLAIN;
        let mut variables = vec![
            (rank, self.world.rank.to_string()),
            (size, self.world.size.to_string()),
            (local_rank, self.local_rank.to_string()),
            ("MASTER_ADDR", self.address.clone()),
            ("MASTER_PORT", self.port.to_string()),
        ];
        variables.extend(self.listener.map(|descriptor| (LISTENER, descriptor.to_string())));
        variables
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Option<Environment>, EnvironmentError> {
        let set = |name: &str| {
            let mut pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
            pairs.find(|(key, _)| *key == name).map(|(_, value)| value.to_owned())
        };
        Environment::of(&set)
    }

    const MASTER: &str = "MASTER_ADDR=node7 MASTER_PORT=29500";

    #[test]
    fn a_process_without_the_variables_is_alone() {
        assert_eq!(read(""), Ok(None));
        assert_eq!(read("RANK=0 WORLD_SIZE=1"), Ok(None));
        // The shell of a batch script, and a job of one task.
        assert_eq!(read("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0"), Ok(None));
        assert_eq!(read(&format!("SLURM_PROCID=0 SLURM_NTASKS=1 {MASTER}")), Ok(None));
    }

    #[test]
    fn the_variables_of_torchrun_come_before_those_of_slurm() {
        let slurm = format!("SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 {MASTER}");
        let expected = Environment {
            world: World { rank: 5, size: 8 },
            local_rank: 1,
            address: "node7".into(),
            port: 29500,
            listener: None,
        };
        assert_eq!(read(&slurm), Ok(Some(expected.clone())));
        let both = format!("RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 {slurm}");
        let ours = read(&both).unwrap().unwrap();
        assert_eq!((ours.world, ours.local_rank), (World { rank: 1, size: 2 }, 0));
        let ours = Environment { listener: Some(7), ..ours };
        let pairs: Vec<String> =
            ours.variables().iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(read(&pairs.join(" ")), Ok(Some(ours)));
    }

    /// A batch script of Slurm may call mpirun.
    #[test]
    fn the_variables_of_mpirun_come_before_those_of_slurm() {
        let slurm = "SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_LOCALID=0";
        for [rank, size, local] in MPI {
            let mpi = format!("{rank}=3 {size}=4 {local}=1 {slurm}");
            let ours = read(&format!("{mpi} {MASTER}")).unwrap().unwrap();
            assert_eq!((ours.world, ours.local_rank), (World { rank: 3, size: 4 }, 1));
            assert_eq!(read(&mpi), Ok(None));
        }
        // Slurm's own PMI.
        let pmi =
            format!("PMI_RANK=1 PMI_SIZE=2 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 {MASTER}");
        assert_eq!(read(&pmi).unwrap().unwrap().world, World { rank: 1, size: 2 });
    }

    #[test]
    fn what_is_missing_or_impossible_is_named() {
        let error = |text: &str| read(text).unwrap_err().to_string();
        assert!(error("RANK=0").starts_with("RANK is set, but WORLD_SIZE is not"));
        assert!(
            error("RANK=0 WORLD_SIZE=2").starts_with("WORLD_SIZE is set, but MASTER_ADDR is not")
        );
        let whole = |text: &str| error(&format!("{text} {MASTER}"));
        assert!(whole("WORLD_SIZE=2").contains("but RANK is not"));
        assert!(whole("RANK=0 WORLD_SIZE=2").contains("but LOCAL_RANK is not"));
        assert_eq!(whole("RANK=2 WORLD_SIZE=2"), "RANK is \"2\"; allowed: 0 to 1");
        assert_eq!(whole("RANK=-1 WORLD_SIZE=2"), "RANK is \"-1\"; allowed: 0 to 1");
        assert_eq!(
            whole("RANK=0 WORLD_SIZE=two"),
            "WORLD_SIZE is \"two\"; allowed: a whole number"
        );
        assert_eq!(whole("RANK=0 WORLD_SIZE=0"), "WORLD_SIZE is \"0\"; allowed: 1 or more");
        let port = error("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=0");
        assert_eq!(port, "MASTER_PORT is \"0\"; allowed: 1 to 65535");
    }
}
