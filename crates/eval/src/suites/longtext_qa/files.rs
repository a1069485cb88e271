//! Which tasks there are files of, and the prompts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::LongtextQaOptions;
use super::tasks::{Source, TASKS, Task};
use crate::EvalError;

/// The tasks to run, their files, and the tasks left out because they have none.
pub(super) type Found = (Vec<Task>, Vec<PathBuf>, Vec<String>);

pub(super) fn find_tasks(options: &LongtextQaOptions) -> Result<Found, EvalError> {
    let (mut tasks, mut paths, mut missing) = (Vec::new(), Vec::new(), Vec::new());
    let folder = |source| match source {
        Source::LongBench => options.longbench.as_deref(),
        Source::Scrolls => options.scrolls.as_deref(),
    };
    for source in Source::ALL {
        if let Some(folder) = folder(source) {
            std::fs::read_dir(folder).map_err(EvalError::read(folder))?;
        }
    }
    for task in TASKS {
        let wanted = options.tasks.contains(&task.id());
        let path = folder(task.source).and_then(|folder| file(folder, &task, options.even));
        match path {
            Some(path) if wanted || options.tasks.is_empty() => {
                tasks.push(task);
                paths.push(path);
            }
            None if wanted => return Err(no_file(&task, folder(task.source))),
            None if folder(task.source).is_some() && options.tasks.is_empty() => {
                missing.push(task.id())
            }
            _ => {}
        }
    }
    if tasks.is_empty() {
        return Err(EvalError::Text {
            what: "longtext-qa: there is no file of any task in the folders given".to_string(),
            remedy: "give the folder with TASK.jsonl (LongBench), with TASK_e.jsonl beside --even, or with \
                     TASK/validation.jsonl (SCROLLS)"
                .to_string(),
        });
    }
    Ok((tasks, paths, missing))
}

/// The error of a task that was asked for and has no file.
fn no_file(task: &Task, folder: Option<&Path>) -> EvalError {
    let id = task.id();
    let what = match folder {
        Some(folder) => format!("longtext-qa.tasks: {id} has no file in {}", folder.display()),
        None => format!("longtext-qa.tasks: {id} needs longtext-qa.{}", task.source.name()),
    };
    EvalError::Text {
        what,
        remedy: "docs/evaluation.md says where the files come from".to_string(),
    }
}

/// The prompt of each task: our own, or LongBench's from a file.
pub(super) fn read_prompts(
    options: &LongtextQaOptions,
    tasks: &[Task],
) -> Result<Vec<String>, EvalError> {
    let Some(path) = &options.prompts else {
        return Ok(tasks.iter().map(|task| task.prompt.to_string()).collect());
    };
    let text = std::fs::read_to_string(path).map_err(EvalError::read(path))?;
    let error = |what: String| EvalError::Text {
        what: format!("{}: {what}", path.display()),
        remedy: "give LongBench's config/dataset2prompt.json".to_string(),
    };
    let prompts: BTreeMap<String, String> =
        serde_json::from_str(&text).map_err(|source| error(source.to_string()))?;
    let prompt = |task: &Task| match task.source {
        Source::Scrolls => Ok(task.prompt.to_string()),
        Source::LongBench => match prompts.get(task.name) {
            Some(prompt) if prompt.matches("{context}").count() == 1 => Ok(prompt.clone()),
            Some(_) => {
                Err(error(format!("the prompt of {} must have {{context}} once", task.name)))
            }
            None => Err(error(format!("there is no prompt of {}", task.name))),
        },
    };
    tasks.iter().map(prompt).collect()
}

/// The file of a task in its source's folder; none if it is not there. Tasks of LongBench may also be those of
/// LongBench-E.
fn file(folder: &Path, task: &Task, even: bool) -> Option<PathBuf> {
    let name = match task.source {
        Source::LongBench if even => format!("{}_e.jsonl", task.name),
        Source::LongBench => format!("{}.jsonl", task.name),
        Source::Scrolls => format!("{}/validation.jsonl", task.name),
    };
    Some(folder.join(name)).filter(|path| path.is_file())
}
