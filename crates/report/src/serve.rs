//! The page on localhost, which follows runs as they train.

use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};

use tiny_http::{Header, Method, Request, Response, Server};

use crate::find::{run_folders, subfolders};
use crate::{Page, ReportError};

/// The report of some folders as a web page for this machine alone.
pub struct Live {
    server: Server,
    paths: Vec<PathBuf>,
    port: u16,
}

impl Live {
    /// Listens on 127.0.0.1 at `port`; 0 is any that is free.
    ///
    /// # Errors
    /// Folders without runs, and a port that is taken.
    pub fn bind(paths: &[PathBuf], port: u16) -> Result<Self, ReportError> {
        run_folders(paths)?;
        let failed = |reason| ReportError::Serve { port, reason };
        let server = Server::http(("127.0.0.1", port)).map_err(|e| failed(e.to_string()))?;
        let address = server.server_addr().to_ip().ok_or_else(|| failed("no address".into()))?;
        Ok(Live { server, paths: paths.to_vec(), port: address.port() })
    }

    /// The page's address.
    pub fn address(&self) -> String {
        format!("http://127.0.0.1:{}/", self.port)
    }

    /// Answers requests until the process ends.
    pub fn serve(&self) {
        for request in self.server.incoming_requests() {
            self.answer(request);
        }
    }

    fn answer(&self, request: Request) {
        let response = match self.route(&request) {
            Ok((status, kind, body)) => respond(status, kind, body),
            Err(error) => {
                tracing::warn!("{error}");
                respond(500, "text/plain; charset=utf-8", error.to_string())
            }
        };
        // A reader who has gone needs no answer.
        let _ = request.respond(response);
    }

    fn route(&self, request: &Request) -> Result<(u16, &'static str, String), ReportError> {
        const TEXT: &str = "text/plain; charset=utf-8";
        if !self.is_for_this_machine(request) {
            return Ok((403, TEXT, "this page is for 127.0.0.1 alone".to_owned()));
        }
        if *request.method() != Method::Get {
            return Ok((405, TEXT, "only GET is allowed".to_owned()));
        }
        let (path, query) = request.url().split_once('?').unwrap_or((request.url(), ""));
        match path {
            "/" => Ok((200, "text/html; charset=utf-8", self.page()?.html())),
            "/data.json" => {
                let version = version(&self.paths)?;
                match query.strip_prefix("since=") == Some(version.as_str()) {
                    true => Ok((204, TEXT, String::new())),
                    false => Ok((200, "application/json", self.page()?.json())),
                }
            }
            _ => Ok((404, TEXT, "there is only /".to_owned())),
        }
    }

    /// Whether the request names this machine: a web page elsewhere whose name resolves to 127.0.0.1 must not
    /// read the report.
    fn is_for_this_machine(&self, request: &Request) -> bool {
        let host = request.headers().iter().find(|header| header.field.equiv("Host"));
        let allowed = ["127.0.0.1", "localhost"].map(|name| format!("{name}:{}", self.port));
        host.is_some_and(|host| allowed.iter().any(|allowed| host.value == allowed.as_str()))
    }

    fn page(&self) -> Result<Page, ReportError> {
        // Before the files are read: what changes meanwhile is shown the next time.
        let version = version(&self.paths)?;
        let mut page = Page::collect(&self.paths)?;
        page.version = Some(version);
        Ok(page)
    }
}

fn respond(status: u16, kind: &str, body: String) -> Response<std::io::Cursor<Vec<u8>>> {
    let header = |name: &str, value: &str| {
        Header::from_bytes(name, value).expect("headers are ASCII constants")
    };
    Response::from_string(body)
        .with_status_code(status)
        .with_header(header("Content-Type", kind))
        .with_header(header("Cache-Control", "no-store"))
        .with_header(header("X-Content-Type-Options", "nosniff"))
}

/// A hash of the names, sizes and times of the files that the page is made of.
fn version(paths: &[PathBuf]) -> Result<String, ReportError> {
    let mut hasher = DefaultHasher::new();
    for run in run_folders(paths)? {
        for name in ["config.toml", "metrics.jsonl", "samples.txt", "finished.json"] {
            stamp(&run.join(name), &mut hasher);
        }
        let evaluations = run.join("eval");
        if evaluations.is_dir() {
            for folder in subfolders(&evaluations)? {
                stamp(&folder.join("results.json"), &mut hasher);
            }
        }
    }
    Ok(format!("{:016x}", hasher.finish()))
}

fn stamp(path: &Path, hasher: &mut DefaultHasher) {
    path.hash(hasher);
    if let Ok(file) = fs::metadata(path) {
        (file.len(), file.modified().ok()).hash(hasher);
    }
}
