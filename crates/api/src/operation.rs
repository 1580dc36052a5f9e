//! Everything that can be asked of an agent: method and path of each operation.

/// An HTTP method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Method {
    /// Reads.
    Get,
    /// Makes something, or makes something happen.
    Post,
    /// Sets a value.
    Put,
    /// Removes.
    Delete,
}

impl Method {
    /// Its name in HTTP.
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
    /// What this host is.
    GetHost,
    /// The hosts that it trusts.
    ListHosts,
    /// Trust one more.
    TrustHost,
    /// Trust one no longer.
    ForgetHost,
    /// Measure the link to one.
    ProbeHost,
    /// The guests of this host.
    ListGuests,
    /// One of them.
    GetGuest,
    /// Start one.
    StartGuest,
    /// Stop one.
    StopGuest,
    /// Attach to one that something else started.
    AttachGuest,
    /// Forget one that was attached to.
    DetachGuest,
    /// Check and predict a migration without changing anything.
    PlanMigration,
    /// Start a migration.
    StartMigration,
    /// The migrations of this host.
    ListMigrations,
    /// One of them.
    GetMigration,
    /// Watch one: a line of JSON for each progress.
    WatchMigration,
    /// Stop one and keep the guest at the source.
    CancelMigration,
    /// Say which side runs the guest of one that is in doubt.
    ResolveMigration,
    /// Change one's limit.
    LimitMigration,
    /// One's report.
    ReportMigration,
    /// This API's description.
    GetOpenapi,
}

impl Operation {
    /// Every operation.
    pub const ALL: [Self; 21] = [
        Self::GetHost,
        Self::ListHosts,
        Self::TrustHost,
        Self::ForgetHost,
        Self::ProbeHost,
        Self::ListGuests,
        Self::GetGuest,
        Self::StartGuest,
        Self::StopGuest,
        Self::AttachGuest,
        Self::DetachGuest,
        Self::PlanMigration,
        Self::StartMigration,
        Self::ListMigrations,
        Self::GetMigration,
        Self::WatchMigration,
        Self::CancelMigration,
        Self::ResolveMigration,
        Self::LimitMigration,
        Self::ReportMigration,
        Self::GetOpenapi,
    ];

    /// Its method.
    pub fn method(self) -> Method {
        self.route().0
    }

    /// Its path, with a `{parameter}` at most.
    pub fn path(self) -> &'static str {
        self.route().1
    }

    /// The name of the parameter in its path.
    pub fn parameter(self) -> Option<&'static str> {
        let (_, rest) = self.path().split_once('{')?;
        rest.split_once('}').map(|(name, _)| name)
    }

    /// Its path with the parameter replaced by a value, which is percent-encoded.
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
            Self::ListGuests => (Get, "/v1/guests"),
            Self::GetGuest => (Get, "/v1/guests/{guest}"),
            Self::StartGuest => (Post, "/v1/guests"),
            Self::StopGuest => (Post, "/v1/guests/{guest}/stop"),
            Self::AttachGuest => (Post, "/v1/guests/{guest}/attach"),
            Self::DetachGuest => (Post, "/v1/guests/{guest}/detach"),
            Self::PlanMigration => (Post, "/v1/plans"),
            Self::StartMigration => (Post, "/v1/migrations"),
            Self::ListMigrations => (Get, "/v1/migrations"),
            Self::GetMigration => (Get, "/v1/migrations/{migration}"),
            Self::WatchMigration => (Get, "/v1/migrations/{migration}/progress"),
            Self::CancelMigration => (Post, "/v1/migrations/{migration}/cancel"),
            Self::ResolveMigration => (Post, "/v1/migrations/{migration}/resolve"),
            Self::LimitMigration => (Put, "/v1/migrations/{migration}/limit"),
            Self::ReportMigration => (Get, "/v1/migrations/{migration}/report"),
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
