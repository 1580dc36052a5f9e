//! Opens, makes, checks and copies the database.

use super::STORE_FILE;
use longhaul_realm::key::RealmId;
use longhaul_realm::limits::{GUEST_BYTES_MAX, RULESET_BYTES_MAX};
use longhaul_realm::ruleset::StoreId;
use longhaul_realm::server::{Durable, Record};
use nix::fcntl::{Flock, FlockArg};
use rusqlite::backup::Backup;
use rusqlite::{Connection, ErrorCode, OpenFlags, params};
use serde::de::DeserializeOwned;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Marks the database as this program's (SQLite's `application_id`): "LhRv".
const APPLICATION: i32 = 0x4c68_5276;
/// The format (SQLite's `user_version`).
const FORMAT: i32 = 1;
/// The file that a running server keeps locked.
const LOCK_FILE: &str = "rendezvous.lock";
/// How long the database may be locked by a backup.
const BUSY: Duration = Duration::from_secs(10);
/// Pages that a backup copies at once, and its pause between.
const BACKUP_STEP: (i32, Duration) = (256, Duration::from_millis(5));
const SCHEMA: &str = "
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
CREATE TABLE ruleset (realm BLOB PRIMARY KEY, document BLOB NOT NULL) STRICT;
CREATE TABLE enrolment (realm BLOB NOT NULL, document BLOB NOT NULL,
    PRIMARY KEY (realm, document)) STRICT;
CREATE TABLE lease (realm BLOB NOT NULL, guest TEXT NOT NULL, entry BLOB NOT NULL,
    PRIMARY KEY (realm, guest)) STRICT;
";

/// Why the store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file or folder.
    #[error("{}: {error}", .path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// Another server uses the folder.
    #[error("another rendezvous server uses {}: stop it, or give this one a folder of its own",
        .0.display())]
    InUse(PathBuf),
    /// Another program's database, or none at all.
    #[error("{} is not the store of a rendezvous server: move it away, or name another folder",
        .0.display())]
    Foreign(PathBuf),
    /// Written by a later version.
    #[error("{} has format {format}, and this version reads {FORMAT}: update Longhaul",
        .path.display())]
    Later {
        /// The file.
        path: PathBuf,
        /// Its format.
        format: i32,
    },
    /// Damaged.
    #[error(
        "{} is damaged: {what}; restore a backup (`longhaul rendezvous backup` makes one), or move \
         the file away and publish the ruleset again: leases and used tokens are lost then",
        .path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was found.
        what: String,
    },
    /// The target of a backup exists.
    #[error("{} exists: name another file", .0.display())]
    Exists(PathBuf),
    /// SQLite refuses.
    #[error("the store: {0}")]
    Sqlite(#[from] rusqlite::Error),
    /// A record cannot be written.
    #[error("a record for the store: {0}")]
    Encoding(#[from] postcard::Error),
    /// The system gives no random numbers.
    #[error("no random numbers: {0}")]
    Random(getrandom::Error),
}

/// Keeps a state folder for one server. The kernel releases it when the server ends.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: Flock<File>,
}

impl Lock {
    /// Locks a folder; makes it if it does not exist.
    pub(crate) fn take(folder: &Path) -> Result<Self, StoreError> {
        let error = |error| StoreError::File {
            path: folder.to_owned(),
            error,
        };
        let mut builder = DirBuilder::new();
        builder
            .recursive(true)
            .mode(0o700)
            .create(folder)
            .map_err(error)?;
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).write(true).mode(0o600);
        let file = options.open(folder.join(LOCK_FILE)).map_err(error)?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock);
        let file = lock.map_err(|_| StoreError::InUse(folder.to_owned()))?;
        Ok(Self { _file: file })
    }
}

/// Opens the database, or makes it.
pub(super) fn open(path: &Path) -> Result<(Connection, Durable), StoreError> {
    let database = connect(path)?;
    let result = check(&database, path).and_then(|is_new| {
        database.pragma_update(None, "journal_mode", "WAL")?;
        database.pragma_update(None, "synchronous", "FULL")?;
        if is_new {
            make(&database)?;
        }
        let store = store_id(&database, path)?;
        load(&database, path, store)
    });
    result
        .map(|durable| (database, durable))
        .map_err(|error| judged(path, error))
}

fn connect(path: &Path) -> Result<Connection, StoreError> {
    // The file exists with its mode before SQLite opens it, and gives it to its companions.
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o600);
    options.open(path).map_err(|error| StoreError::File {
        path: path.to_owned(),
        error,
    })?;
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let database = Connection::open_with_flags(path, flags)?;
    database.busy_timeout(BUSY)?;
    Ok(database)
}

/// Says what SQLite's errors mean for the file.
fn judged(path: &Path, error: StoreError) -> StoreError {
    let code = match &error {
        StoreError::Sqlite(error) => error.sqlite_error_code(),
        _ => None,
    };
    match code {
        Some(ErrorCode::NotADatabase) => StoreError::Foreign(path.to_owned()),
        Some(ErrorCode::DatabaseCorrupt) => damaged(path, &error),
        _ => error,
    }
}

fn damaged(path: &Path, what: &dyn std::fmt::Display) -> StoreError {
    StoreError::Damaged {
        path: path.to_owned(),
        what: what.to_string(),
    }
}

/// Checks whose database this is and whether it is whole. Returns whether it is empty.
fn check(database: &Connection, path: &Path) -> Result<bool, StoreError> {
    let number = |name: &str| database.pragma_query_value(None, name, |row| row.get::<_, i32>(0));
    let application = number("application_id")?;
    let tables: i64 =
        database.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if application == 0 && tables == 0 {
        return Ok(true);
    }
    if application != APPLICATION {
        return Err(StoreError::Foreign(path.to_owned()));
    }
    let format = number("user_version")?;
    if format != FORMAT {
        let path = path.to_owned();
        return Err(StoreError::Later { path, format });
    }
    let found: String = database.pragma_query_value(None, "quick_check", |row| row.get(0))?;
    match &found[..] {
        "ok" => Ok(false),
        found => Err(damaged(path, &found)),
    }
}

fn make(database: &Connection) -> Result<(), StoreError> {
    let transaction = database.unchecked_transaction()?;
    transaction.execute_batch(SCHEMA)?;
    transaction.pragma_update(None, "application_id", APPLICATION)?;
    transaction.pragma_update(None, "user_version", FORMAT)?;
    put_store_id(&transaction)?;
    Ok(transaction.commit()?)
}

fn put_store_id(database: &Connection) -> Result<StoreId, StoreError> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(StoreError::Random)?;
    let sql = "INSERT OR REPLACE INTO meta (key, value) VALUES ('store', ?1)";
    database.execute(sql, params![id])?;
    Ok(StoreId(id))
}

/// Returns the id of the store. One that was restored from a backup gets a new one: it has
/// forgotten leases.
fn store_id(database: &Connection, path: &Path) -> Result<StoreId, StoreError> {
    let sql = "SELECT count(*) FROM meta WHERE key = 'backup'";
    let restored: i64 = database.query_row(sql, [], |row| row.get(0))?;
    if restored > 0 {
        let transaction = database.unchecked_transaction()?;
        let id = put_store_id(&transaction)?;
        transaction.execute("DELETE FROM meta WHERE key = 'backup'", [])?;
        transaction.commit()?;
        tracing::warn!(
            "the store was restored from a backup and has a new id: sign it into the ruleset if \
             this server is the realm's arbiter"
        );
        return Ok(id);
    }
    let sql = "SELECT value FROM meta WHERE key = 'store'";
    let id: Vec<u8> = database.query_row(sql, [], |row| row.get(0))?;
    let id = id.try_into().map(StoreId);
    id.map_err(|_| damaged(path, &"the id of the store has another length"))
}

fn load(database: &Connection, path: &Path, store: StoreId) -> Result<Durable, StoreError> {
    let mut durable = Durable::new(store);
    let mut rows = database.prepare("SELECT document FROM ruleset")?;
    for row in rows.query_map([], |row| row.get::<_, Vec<u8>>(0))? {
        let ruleset = decode(path, &row?, RULESET_BYTES_MAX + 1024)?;
        durable.apply(Record::Ruleset(ruleset));
    }
    let mut rows = database.prepare("SELECT document FROM enrolment")?;
    for row in rows.query_map([], |row| row.get::<_, Vec<u8>>(0))? {
        let enrolment = decode(path, &row?, RULESET_BYTES_MAX)?;
        durable.apply(Record::Enrolment(Box::new(enrolment)));
    }
    let mut rows = database.prepare("SELECT realm, guest, entry FROM lease")?;
    let row = |row: &rusqlite::Row<'_>| {
        let realm: Vec<u8> = row.get(0)?;
        let (guest, entry): (String, Vec<u8>) = (row.get(1)?, row.get(2)?);
        Ok((realm, guest, entry))
    };
    for row in rows.query_map([], row)? {
        let (realm, guest, entry) = row?;
        let realm = realm.try_into().map(RealmId);
        let realm = realm.map_err(|_| damaged(path, &"the id of a realm has another length"))?;
        if guest.len() > GUEST_BYTES_MAX {
            return Err(damaged(path, &"the name of a guest is too long"));
        }
        let entry = decode(path, &entry, 1024)?;
        durable.apply(Record::Lease {
            realm,
            guest,
            entry,
        });
    }
    Ok(durable)
}

fn decode<T: DeserializeOwned>(path: &Path, bytes: &[u8], limit: usize) -> Result<T, StoreError> {
    if bytes.len() > limit {
        return Err(damaged(path, &"a document is too long"));
    }
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok(_) => Err(damaged(path, &"bytes follow the end of a document")),
        Err(error) => Err(damaged(path, &format!("a document is malformed: {error}"))),
    }
}

/// Copies the database of a state folder into a new file, while a server may use it. Who restores
/// the copy gets a new store id.
pub fn backup(folder: &Path, to: &Path) -> Result<(), StoreError> {
    let from = folder.join(STORE_FILE);
    let file_error = |path: &Path, error| StoreError::File {
        path: path.to_owned(),
        error,
    };
    std::fs::metadata(&from).map_err(|error| file_error(&from, error))?;
    if to.exists() {
        return Err(StoreError::Exists(to.to_owned()));
    }
    let source = connect(&from)?;
    check(&source, &from).map_err(|error| judged(&from, error))?;
    let mut name = to.as_os_str().to_owned();
    name.push(".new");
    let temporary = PathBuf::from(name);
    let copied = copy(&source, &temporary).and_then(|()| {
        let file = File::open(&temporary).map_err(|error| file_error(&temporary, error))?;
        file.sync_all()
            .map_err(|error| file_error(&temporary, error))?;
        std::fs::rename(&temporary, to).map_err(|error| file_error(to, error))
    });
    if copied.is_err() {
        // The first error is the one to report.
        let _ = std::fs::remove_file(&temporary);
    }
    copied
}

fn copy(source: &Connection, to: &Path) -> Result<(), StoreError> {
    // What an interrupted backup left.
    match std::fs::remove_file(to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            let path = to.to_owned();
            return Err(StoreError::File { path, error });
        }
        _ => {}
    }
    let mut target = connect(to)?;
    let (pages, pause) = BACKUP_STEP;
    Backup::new(source, &mut target)?.run_to_completion(pages, pause, None)?;
    target.pragma_update(None, "journal_mode", "DELETE")?;
    let sql = "INSERT OR REPLACE INTO meta (key, value) VALUES ('backup', x'01')";
    target.execute(sql, [])?;
    target.close().map_err(|(_, error)| StoreError::from(error))
}
