//! Broken variants: each changes one thing of what surrounds the cores. A run that misses one of
//! them proves nothing.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    /// Nothing is changed.
    Genuine,
    /// A server says that a record is durable, and loses it in a crash.
    ServerRecordsVolatile,
    /// A host says that a record is durable, and loses it in a crash.
    HostRecordsVolatile,
    /// A restored backup of an arbiter keeps the id of its lease store.
    BackupKeepsStore,
    /// Hosts ask the store of their ruleset, whichever their handover began with.
    StoreOfTheDay,
    /// The host of a token gives the secret to the server, as with a hashed random secret.
    SecretAtServer,
    /// The realm's key is on the server.
    KeyAtServer,
    /// A removed host that joined by a token gets no tombstone.
    NoTombstone,
    /// Hosts do not tell each other what they have.
    NoGossip,
    /// Connections with removed hosts are not ended.
    CutIgnored,
    /// Time limits and retries of hosts do not happen.
    NoTimeouts,
}

impl Variant {
    pub(crate) const BROKEN: [Variant; 10] = [
        Variant::ServerRecordsVolatile,
        Variant::HostRecordsVolatile,
        Variant::BackupKeepsStore,
        Variant::StoreOfTheDay,
        Variant::SecretAtServer,
        Variant::KeyAtServer,
        Variant::NoTombstone,
        Variant::NoGossip,
        Variant::CutIgnored,
        Variant::NoTimeouts,
    ];
}
