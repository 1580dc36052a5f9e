//! Owns the durable state of a server: an SQLite database, written by one thread.
//!
//! What was written in one order becomes durable in that order: rulesets, used tokens and leases
//! that wait together go into one transaction. `docs/rendezvous.md`, section 6, has the format.

mod open;

pub(crate) use open::Lock;
pub use open::{StoreError, backup};

use longhaul_realm::key::RealmId;
use longhaul_realm::server::{Durable, LeaseEntry, Record, WriteId};
use rusqlite::{Connection, params};
use std::path::Path;
use std::sync::mpsc;
use std::thread::JoinHandle;

/// The name of the database in the state folder.
pub const STORE_FILE: &str = "rendezvous.db";
/// Most writes in one transaction.
const BATCH: usize = 256;

/// A write that waits.
pub(crate) type Order = (WriteId, Record);

/// The database, and its thread.
pub(crate) struct Store {
    orders: Option<mpsc::Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl Store {
    /// Opens the database in a folder, or makes it. Returns what it has, and the database for
    /// [`Store::start`].
    pub(crate) fn open(folder: &Path) -> Result<(Connection, Durable), StoreError> {
        open::open(&folder.join(STORE_FILE))
    }

    /// Starts the thread. `done` is told of the writes that are durable, or that failed.
    pub(crate) fn start(
        database: Connection,
        done: impl Fn(&[WriteId], bool) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (orders, ordered) = mpsc::channel();
        let thread = std::thread::Builder::new().name("store".to_owned());
        let thread = thread.spawn(move || write_all(database, &ordered, done))?;
        Ok(Self {
            orders: Some(orders),
            thread: Some(thread),
        })
    }

    /// Returns what takes writes.
    pub(crate) fn orders(&self) -> Option<mpsc::Sender<Order>> {
        self.orders.clone()
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Store")
    }
}

/// Waits until everything is written.
impl Drop for Store {
    fn drop(&mut self) {
        drop(self.orders.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the store broke");
        }
    }
}

fn write_all(
    mut database: Connection,
    orders: &mpsc::Receiver<Order>,
    done: impl Fn(&[WriteId], bool),
) {
    while let Ok(first) = orders.recv() {
        let mut batch = vec![first];
        batch.extend(orders.try_iter().take(BATCH - 1));
        let written = write(&mut database, &batch);
        if let Err(error) = &written {
            tracing::error!(%error, "cannot write to the store: look at the server's disk");
        }
        let ids: Vec<WriteId> = batch.iter().map(|(id, _)| *id).collect();
        done(&ids, written.is_ok());
    }
    if let Err((_, error)) = database.close() {
        tracing::warn!(%error, "the store was not closed cleanly; nothing is lost");
    }
}

/// Writes records in one transaction.
fn write(database: &mut Connection, batch: &[Order]) -> Result<(), StoreError> {
    let transaction = database.transaction()?;
    for (_, record) in batch {
        put(&transaction, record)?;
    }
    Ok(transaction.commit()?)
}

fn put(database: &Connection, record: &Record) -> Result<(), StoreError> {
    match record {
        Record::Ruleset(ruleset) => {
            let realm = ruleset.key.realm();
            let bytes = postcard::to_stdvec(ruleset)?;
            let sql = "INSERT OR REPLACE INTO ruleset (realm, document) VALUES (?1, ?2)";
            database.execute(sql, params![realm.0, bytes])?;
        }
        Record::Enrolment(enrolment) => {
            let realm = enrolment.authorisation.key.realm();
            let bytes = postcard::to_stdvec(enrolment)?;
            let sql = "INSERT OR IGNORE INTO enrolment (realm, document) VALUES (?1, ?2)";
            database.execute(sql, params![realm.0, bytes])?;
        }
        Record::Lease {
            realm,
            guest,
            entry,
        } => put_lease(database, *realm, guest, entry)?,
    }
    Ok(())
}

fn put_lease(
    database: &Connection,
    realm: RealmId,
    guest: &str,
    entry: &LeaseEntry,
) -> Result<(), StoreError> {
    let bytes = postcard::to_stdvec(entry)?;
    let sql = "INSERT OR REPLACE INTO lease (realm, guest, entry) VALUES (?1, ?2, ?3)";
    database.execute(sql, params![realm.0, guest, bytes])?;
    Ok(())
}

#[cfg(test)]
mod tests;
