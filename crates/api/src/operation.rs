//! Defines the operations of an agent, with the method and path of each.

/// An HTTP method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// Reads a value.
    Get,
    /// Creates a value, or starts an action.
    Post,
    /// Sets a value.
    Put,
    /// Removes a value.
    Delete,
}

impl Method {
    /// Returns the method's name in HTTP.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Post => "POST",
            Self::Put => "PUT",
            Self::Delete => "DELETE",
        }
    }
}

/// An operation of the API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Returns this host.
    GetHost,
    /// Returns the trusted hosts.
    ListHosts,
    /// Trusts a host.
    TrustHost,
    /// Removes the trust in a host.
    ForgetHost,
    /// Measures the link to a trusted host.
    ProbeHost,
    /// Returns the realm of this host.
    GetRealm,
    /// Joins a realm with a token.
    JoinRealm,
    /// Forgets the realm of this host.
    LeaveRealm,
    /// Returns the guests of this host.
    ListGuests,
    /// Returns one guest.
    GetGuest,
    /// Starts a guest.
    StartGuest,
    /// Stops a guest.
    StopGuest,
    /// Resumes a guest that a move has left paused.
    ResumeGuest,
    /// Reclaims the right to run a guest from a host that never returns.
    ReclaimGuest,
    /// Attaches a guest that another program started.
    AttachGuest,
    /// Detaches an attached guest.
    DetachGuest,
    /// Returns the QEMU processes of this host.
    DiscoverGuests,
    /// Begins to track a guest's writes to its local disks.
    TrackWrites,
    /// Returns the tracked writes of a guest.
    GetTrackedWrites,
    /// Ends the tracking of a guest's writes.
    StopTrackingWrites,
    /// Begins to replicate a guest to another host, or changes how.
    ReplicateGuest,
    /// Returns the replications of this host's guests.
    ListReplications,
    /// Ends the replication of a guest. The other host keeps what it has.
    StopReplication,
    /// Returns the replicas that this host keeps.
    ListReplicas,
    /// Removes a replica with all its versions.
    RemoveReplica,
    /// Lets a guest run here from its replica.
    FailOver,
    /// Opens a channel to a device of a parcel that is attached to another host.
    UseParcelDevice,
    /// Checks and predicts a migration without changing anything.
    PlanMigration,
    /// Starts a migration.
    StartMigration,
    /// Returns the migrations of this host.
    ListMigrations,
    /// Returns one migration.
    GetMigration,
    /// Watches a migration: one line of JSON for each change of its progress.
    WatchMigration,
    /// Cancels a migration. The guest stays at the source.
    CancelMigration,
    /// Resolves a migration whose agents cannot connect: decides which side runs the guest.
    ResolveMigration,
    /// Changes a migration's rate limit.
    LimitMigration,
    /// Returns a migration's report.
    ReportMigration,
    /// Watches the host: one line of JSON for each change of its migrations and reserved guests.
    WatchEvents,
    /// Returns the OpenAPI description of this API.
    GetOpenapi,
}

impl Operation {
    /// All operations.
    pub const ALL: [Self; 38] = [
        Self::GetHost,
        Self::ListHosts,
        Self::TrustHost,
        Self::ForgetHost,
        Self::ProbeHost,
        Self::GetRealm,
        Self::JoinRealm,
        Self::LeaveRealm,
        Self::ListGuests,
        Self::GetGuest,
        Self::StartGuest,
        Self::StopGuest,
        Self::ResumeGuest,
        Self::ReclaimGuest,
        Self::AttachGuest,
        Self::DetachGuest,
        Self::DiscoverGuests,
        Self::TrackWrites,
        Self::GetTrackedWrites,
        Self::StopTrackingWrites,
        Self::ReplicateGuest,
        Self::ListReplications,
        Self::StopReplication,
        Self::ListReplicas,
        Self::RemoveReplica,
        Self::FailOver,
        Self::UseParcelDevice,
        Self::PlanMigration,
        Self::StartMigration,
        Self::ListMigrations,
        Self::GetMigration,
        Self::WatchMigration,
        Self::CancelMigration,
        Self::ResolveMigration,
        Self::LimitMigration,
        Self::ReportMigration,
        Self::WatchEvents,
        Self::GetOpenapi,
    ];

    /// Returns the operation's method.
    pub fn method(self) -> Method {
        self.route().0
    }

    /// Returns the operation's path, with at most one `{parameter}`.
    pub fn path(self) -> &'static str {
        self.route().1
    }

    /// Returns the name of the path's parameter.
    pub fn parameter(self) -> Option<&'static str> {
        let (_, rest) = self.path().split_once('{')?;
        rest.split_once('}').map(|(name, _)| name)
    }

    /// Returns the path with the parameter replaced by the percent-encoded value.
    pub fn path_with(self, value: &str) -> String {
        let Some(name) = self.parameter() else {
            return self.path().to_owned();
        };
        let mut encoded = String::with_capacity(value.len());
        for byte in value.bytes() {
            if byte.is_ascii_alphanumeric() || b"-_.".contains(&byte) {
                encoded.push(char::from(byte));
            } else {
                encoded.push_str(&format!("%{byte:02X}"));
            }
        }
        self.path().replace(&format!("{{{name}}}"), &encoded)
    }

    fn route(self) -> (Method, &'static str) {
        use Method::{Delete, Get, Post, Put};
        match self {
            Self::GetHost => (Get, "/v1/host"),
            Self::ListHosts => (Get, "/v1/hosts"),
            Self::TrustHost => (Post, "/v1/hosts"),
            Self::ForgetHost => (Delete, "/v1/hosts/{host}"),
            Self::ProbeHost => (Post, "/v1/hosts/{host}/probe"),
            Self::GetRealm => (Get, "/v1/realm"),
            Self::JoinRealm => (Post, "/v1/realm"),
            Self::LeaveRealm => (Delete, "/v1/realm"),
            Self::ListGuests => (Get, "/v1/guests"),
            Self::GetGuest => (Get, "/v1/guests/{guest}"),
            Self::StartGuest => (Post, "/v1/guests"),
            Self::StopGuest => (Post, "/v1/guests/{guest}/stop"),
            Self::ResumeGuest => (Post, "/v1/guests/{guest}/resume"),
            Self::ReclaimGuest => (Post, "/v1/guests/{guest}/reclaim"),
            Self::AttachGuest => (Post, "/v1/guests/{guest}/attach"),
            Self::DetachGuest => (Post, "/v1/guests/{guest}/detach"),
            Self::DiscoverGuests => (Get, "/v1/discovered-guests"),
            Self::TrackWrites => (Post, "/v1/guests/{guest}/tracked-writes"),
            Self::GetTrackedWrites => (Get, "/v1/guests/{guest}/tracked-writes"),
            Self::StopTrackingWrites => (Delete, "/v1/guests/{guest}/tracked-writes"),
            Self::ReplicateGuest => (Put, "/v1/guests/{guest}/replication"),
            Self::ListReplications => (Get, "/v1/replications"),
            Self::StopReplication => (Delete, "/v1/guests/{guest}/replication"),
            Self::ListReplicas => (Get, "/v1/replicas"),
            Self::RemoveReplica => (Delete, "/v1/replicas/{guest}"),
            Self::FailOver => (Post, "/v1/replicas/{guest}/failover"),
            Self::UseParcelDevice => (Post, "/v1/hosts/{host}/parcel-device"),
            Self::PlanMigration => (Post, "/v1/plans"),
            Self::StartMigration => (Post, "/v1/migrations"),
            Self::ListMigrations => (Get, "/v1/migrations"),
            Self::GetMigration => (Get, "/v1/migrations/{migration}"),
            Self::WatchMigration => (Get, "/v1/migrations/{migration}/progress"),
            Self::CancelMigration => (Post, "/v1/migrations/{migration}/cancel"),
            Self::ResolveMigration => (Post, "/v1/migrations/{migration}/resolve"),
            Self::LimitMigration => (Put, "/v1/migrations/{migration}/limit"),
            Self::ReportMigration => (Get, "/v1/migrations/{migration}/report"),
            Self::WatchEvents => (Get, "/v1/events"),
            Self::GetOpenapi => (Get, "/v1/openapi.json"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_two_operations_share_a_route() {
        let routes: HashSet<_> = Operation::ALL.into_iter().map(Operation::route).collect();
        assert_eq!(routes.len(), Operation::ALL.len());
    }

    #[test]
    fn a_value_cannot_leave_its_place_in_the_path() {
        assert_eq!(
            Operation::StopGuest.path_with("../a b?ü"),
            "/v1/guests/..%2Fa%20b%3F%C3%BC/stop"
        );
        assert_eq!(Operation::GetHost.path_with("x"), "/v1/host");
    }
}
