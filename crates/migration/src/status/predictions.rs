//! The predictions of moves that completed, and their outcomes. Later predictions are corrected by
//! them.
//!
//! They are in the file `predictions.json` in the state folder, which may be removed at any time.

use crate::host::atomic_file;
use crate::host::lock::lock;
use longhaul_api::Strategy;
use longhaul_engine::forecast::{Error, Learned};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// The name of the file, in the state folder.
const FILE: &str = "predictions.json";
/// The version of the file's format.
const VERSION: u32 = 1;
/// Limit on the size of the file, in bytes.
const BYTES_MAX: u64 = 1 << 20;
/// Limit on the number of moves.
const MOVES_MAX: usize = 512;
/// Number of the latest moves of one kind that are kept.
const KIND_MAX: usize = 8;
/// Number of moves of a guest from which on those of other guests do not count.
const OWN_MIN: usize = 2;
/// Number of the latest moves of other guests that count.
const OTHERS_MAX: usize = 16;

/// The kind of a move: those of one kind have similar errors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Kind {
    pub(crate) guest: String,
    /// The destination.
    pub(crate) host: String,
    /// Whether the guest had left the destination before.
    pub(crate) returns: bool,
    /// Strategy for the memory.
    pub(crate) strategy: Strategy,
}

impl Kind {
    fn is_like(&self, other: &Self) -> bool {
        let of = |it: &Self| (it.host.clone(), it.returns, it.strategy);
        of(self) == of(other)
    }
}

/// The figures of a prediction, before it is corrected, or of an outcome.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figures {
    pub(crate) link_bytes: f64,
    pub(crate) total_ms: f64,
    pub(crate) downtime_ms: f64,
}

impl Figures {
    fn each(&self) -> [f64; 3] {
        [self.link_bytes, self.total_ms, self.downtime_ms]
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Move {
    kind: Kind,
    predicted: Figures,
    was: Figures,
}

#[derive(Serialize, Deserialize)]
struct Document {
    version: u32,
    /// Oldest first.
    moves: Vec<Move>,
}

/// The moves that completed.
pub(crate) struct Predictions {
    path: PathBuf,
    moves: Mutex<Vec<Move>>,
}

impl Predictions {
    /// Reads the file. Nothing depends on it, so one that cannot be read is logged, and replaced
    /// after the next move.
    pub(crate) fn open(state: &Path) -> Self {
        let path = state.join(FILE);
        let moves = read(&path).unwrap_or_else(|error| {
            tracing::warn!(%error, path = %path.display(), "cannot read the earlier predictions");
            Vec::new()
        });
        Self {
            path,
            moves: Mutex::new(moves),
        }
    }

    /// Returns what is known of the errors in data, time and downtime of a kind of moves, and from
    /// how many: the guest's own ones, or, if these are fewer than [`OWN_MIN`], those of all
    /// guests over this link.
    pub(crate) fn learned(&self, kind: &Kind) -> ([Learned; 3], usize) {
        let moves = lock(&self.moves);
        let own: Vec<&Move> = moves.iter().filter(|it| it.kind == *kind).collect();
        let used = match own.len() < OWN_MIN {
            true => {
                let like = moves.iter().rev().filter(|it| it.kind.is_like(kind));
                like.take(OTHERS_MAX).collect()
            }
            false => own,
        };
        let errors = |figure: usize| -> Vec<Error> {
            let of = |it: &&Move| {
                let [predicted, was] = [it.predicted, it.was].map(|figures| figures.each());
                Error::of(*predicted.get(figure)?, *was.get(figure)?)
            };
            used.iter().filter_map(of).collect()
        };
        let learned = [0, 1, 2].map(|figure| Learned::from(&errors(figure)));
        (learned, used.len())
    }

    /// Adds a move. Its file is written in the background of the move's end: a failure is logged.
    pub(crate) fn add(&self, kind: Kind, predicted: Figures, was: Figures) {
        let mut moves = lock(&self.moves);
        let of_kind = moves.iter().filter(|it| it.kind == kind).count();
        if of_kind >= KIND_MAX
            && let Some(oldest) = moves.iter().position(|it| it.kind == kind)
        {
            moves.remove(oldest);
        }
        moves.push(Move {
            kind,
            predicted,
            was,
        });
        let excess = moves.len().saturating_sub(MOVES_MAX);
        moves.drain(..excess);
        let document = Document {
            version: VERSION,
            moves: moves.clone(),
        };
        let written = serde_json::to_vec(&document)
            .map_err(io::Error::other)
            .and_then(|bytes| atomic_file::write(&self.path, &bytes));
        if let Err(error) = written {
            tracing::warn!(%error, path = %self.path.display(), "cannot keep a prediction");
        }
    }
}

fn read(path: &Path) -> io::Result<Vec<Move>> {
    match fs::metadata(path) {
        Ok(found) if found.len() > BYTES_MAX => return Err(io::Error::other("it is too long")),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    }
    let document: Document = serde_json::from_slice(&fs::read(path)?).map_err(io::Error::other)?;
    if document.version != VERSION {
        let text = format!("its version is {}, not {VERSION}", document.version);
        return Err(io::Error::other(text));
    }
    let mut moves = document.moves;
    let excess = moves.len().saturating_sub(MOVES_MAX);
    moves.drain(..excess);
    Ok(moves)
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_engine::forecast::Range;

    fn kind(guest: &str, host: &str) -> Kind {
        Kind {
            guest: guest.to_owned(),
            host: host.to_owned(),
            returns: false,
            strategy: Strategy::Precopy,
        }
    }

    fn figures(all: f64) -> Figures {
        Figures {
            link_bytes: all,
            total_ms: all,
            downtime_ms: all,
        }
    }

    fn middle(predictions: &Predictions, kind: &Kind) -> f64 {
        let range = Range {
            low: 50.0,
            likely: 100.0,
            high: 200.0,
        };
        predictions.learned(kind).0[1].correct(range).likely.round()
    }

    #[test]
    fn outcomes_survive_the_agent_and_correct_their_own_kind() {
        let state = tempfile::tempdir().unwrap();
        let open = || Predictions::open(state.path());
        let web = kind("web-7", "paris-2");
        for _ in 0..3 {
            open().add(web.clone(), figures(100.0), figures(200.0));
        }
        let predictions = open();
        assert_eq!(middle(&predictions, &web), 200.0);
        assert_eq!(predictions.learned(&web).1, 3);
        // A guest without moves of its own is like the others over this link.
        assert_eq!(middle(&predictions, &kind("db-1", "paris-2")), 200.0);
        assert_eq!(middle(&predictions, &kind("web-7", "oslo-1")), 100.0);
        let back = Kind {
            returns: true,
            ..web.clone()
        };
        assert_eq!(middle(&predictions, &back), 100.0);
    }

    #[test]
    fn only_the_latest_moves_are_kept() {
        let state = tempfile::tempdir().unwrap();
        let predictions = Predictions::open(state.path());
        let web = kind("web-7", "paris-2");
        for was in [100.0; 2].into_iter().chain([300.0; KIND_MAX]) {
            predictions.add(web.clone(), figures(100.0), figures(was));
        }
        assert_eq!(predictions.learned(&web).1, KIND_MAX);
        assert_eq!(middle(&predictions, &web), 300.0);
        for guest in 0..MOVES_MAX {
            let other = kind(&format!("guest-{guest}"), "oslo-1");
            lock(&predictions.moves).push(Move {
                kind: other,
                predicted: figures(1.0),
                was: figures(1.0),
            });
        }
        predictions.add(kind("last", "oslo-1"), figures(1.0), figures(1.0));
        assert_eq!(lock(&predictions.moves).len(), MOVES_MAX);
        let length = fs::metadata(state.path().join(FILE)).unwrap().len();
        assert!(length < BYTES_MAX, "{length}");
    }

    #[test]
    fn a_file_that_cannot_be_read_is_replaced() {
        let state = tempfile::tempdir().unwrap();
        let path = state.path().join(FILE);
        let web = kind("web-7", "paris-2");
        for text in ["", "{", r#"{"version": 2, "moves": []}"#] {
            fs::write(&path, text).unwrap();
            assert!(read(&path).is_err(), "{text}");
            let predictions = Predictions::open(state.path());
            assert_eq!(predictions.learned(&web).1, 0);
            predictions.add(web.clone(), figures(1.0), figures(1.0));
            assert_eq!(Predictions::open(state.path()).learned(&web).1, 1);
        }
        let file = fs::File::create(&path).unwrap();
        file.set_len(BYTES_MAX + 1).unwrap();
        assert!(read(&path).is_err());
    }
}
