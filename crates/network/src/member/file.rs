//! Owns the file of a member: realm, servers, ruleset and enrolments, written as a whole.
//!
//! `docs/rendezvous.md`, section 6.2, has the format.

use longhaul_protocol::HostId;
use longhaul_realm::key::RealmId;
use longhaul_realm::limits::{ENROLMENTS_MAX, RULESET_BYTES_MAX, SERVERS_MAX};
use longhaul_realm::member::{Kept, Record};
use longhaul_realm::ruleset::ServerEntry;
use longhaul_realm::server::WriteId;
use longhaul_realm::token::Token;
use longhaul_transport::write_atomic;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;

/// The name of the file in the state folder.
pub const MEMBER_FILE: &str = "realm-member";
/// Longest file, in bytes.
pub const FILE_BYTES_MAX: u64 = 4 << 20;
const MAGIC: [u8; 8] = *b"LHREALM1";
const SUM_BYTES: usize = 32;

/// What a host keeps of its realm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stored {
    /// The realm.
    pub realm: RealmId,
    /// The servers of the token, until a ruleset names some.
    pub servers: Vec<ServerEntry>,
    /// The documents.
    pub kept: Kept,
}

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file cannot be read or written.
    #[error("{}: {error}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// Another file, or a damaged one.
    #[error("{} is damaged: {what}; move it away and join the realm again", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was found.
        what: String,
    },
}

impl Stored {
    /// What a host has that uses a token.
    pub fn of_token(
        token: &Token,
        host: HostId,
        unix_s: u64,
    ) -> Result<Self, longhaul_realm::token::TokenError> {
        Ok(Self {
            realm: token.realm(),
            servers: token.servers().to_vec(),
            kept: Kept {
                ruleset: None,
                enrolments: vec![token.enrol(host, unix_s)?],
            },
        })
    }

    /// Returns the bytes of the file.
    pub fn encode(&self) -> Result<Vec<u8>, postcard::Error> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(postcard::to_stdvec(self)?);
        let sum = blake3::hash(&bytes);
        bytes.extend(sum.as_bytes());
        Ok(bytes)
    }

    /// Parses the bytes of the file. Signatures are checked by who uses it.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        if !bytes.starts_with(&MAGIC) {
            return Err("it begins with other bytes".to_owned());
        }
        let content = bytes.len().checked_sub(SUM_BYTES);
        let split = content.and_then(|at| bytes.split_at_checked(at));
        let (content, sum) = split.ok_or("it is too short")?;
        if blake3::hash(content).as_bytes()[..] != *sum {
            return Err("its checksum is wrong".to_owned());
        }
        let content = content.get(MAGIC.len()..).ok_or("it is too short")?;
        let (stored, rest): (Self, _) =
            postcard::take_from_bytes(content).map_err(|error| error.to_string())?;
        let sound = rest.is_empty()
            && stored.servers.len() <= SERVERS_MAX
            && stored.kept.enrolments.len() <= ENROLMENTS_MAX
            && (stored.kept.ruleset.as_ref()).is_none_or(|r| r.bytes.len() <= RULESET_BYTES_MAX);
        match sound {
            true => Ok(stored),
            false => Err("its content is over a limit".to_owned()),
        }
    }

    /// Reads the file of a state folder, if there is one.
    pub fn read(folder: &Path) -> Result<Option<Self>, FileError> {
        let path = folder.join(MEMBER_FILE);
        let error = |error| FileError::File {
            path: path.clone(),
            error,
        };
        let damaged = |what| FileError::Damaged {
            path: path.clone(),
            what,
        };
        match std::fs::metadata(&path) {
            Ok(found) if found.len() > FILE_BYTES_MAX => {
                return Err(damaged("it is too long".to_owned()));
            }
            Ok(_) => {}
            Err(found) if found.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(found) => return Err(error(found)),
        }
        let bytes = std::fs::read(&path).map_err(error)?;
        Self::decode(&bytes).map(Some).map_err(damaged)
    }

    /// Writes the file, durably.
    pub fn write(&self, folder: &Path) -> Result<(), FileError> {
        let path = folder.join(MEMBER_FILE);
        let bytes = self.encode().map_err(io::Error::other);
        bytes
            .and_then(|bytes| write_atomic(&path, &bytes))
            .map_err(|error| FileError::File { path, error })
    }
}

/// A write that waits.
pub(super) enum Order {
    /// A record.
    Record(WriteId, Record),
    /// Everything that is kept, in place of what was written before.
    All(Kept),
}

/// The thread that writes.
#[derive(Debug)]
pub(super) struct Writer {
    orders: Option<mpsc::Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Starts the thread. `done` is told which write is durable, or failed.
    pub(super) fn start(
        folder: PathBuf,
        stored: Stored,
        done: impl Fn(WriteId, bool) + Send + 'static,
    ) -> io::Result<Self> {
        let (orders, ordered) = mpsc::channel();
        let thread = std::thread::Builder::new().name("realm".to_owned());
        let thread = thread.spawn(move || write_all(&folder, stored, &ordered, done))?;
        Ok(Self {
            orders: Some(orders),
            thread: Some(thread),
        })
    }

    /// Asks for a write; returns whether the thread is there.
    pub(super) fn put(&self, order: Order) -> bool {
        let orders = self.orders.as_ref();
        orders.is_some_and(|orders| orders.send(order).is_ok())
    }
}

/// Waits until everything is written.
impl Drop for Writer {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that keeps the realm's documents broke");
        }
    }
}

fn write_all(
    folder: &Path,
    mut stored: Stored,
    orders: &mpsc::Receiver<Order>,
    done: impl Fn(WriteId, bool),
) {
    while let Ok(order) = orders.recv() {
        let id = match order {
            Order::Record(id, record) => {
                stored.kept.apply(record);
                Some(id)
            }
            Order::All(kept) => {
                stored.kept = kept;
                None
            }
        };
        let written = stored.write(folder);
        if let Err(error) = &written {
            tracing::error!(%error, "cannot keep the realm's documents: look at the disk");
        }
        if let Some(id) = id {
            done(id, written.is_ok());
        }
    }
}
