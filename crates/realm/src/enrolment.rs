//! Owns how a host joins while the realm's key is offline: authorisations and enrolments.
//!
//! The operator signs an *authorisation*: the holder of a one-time key may name one host. The
//! joining host signs its own id with that key: an *enrolment*. Every host verifies the chain realm
//! key → one-time key → host id by itself. The one-time key travels in the token, from the operator
//! to the new host; a server never sees it. So a server cannot name a host of its choice.

use crate::key::{PublicKey, RealmId, Signature, SigningKey};
use crate::limits::{
    AUTHORISATION_BYTES_MAX, CONFIRM_S_MAX, TOKEN_LIFETIME_S_MAX, TOKEN_NETWORKS_MAX,
};
use crate::ruleset::{NetworkId, Scope, limit, name};
use crate::signed::{Document, DocumentError, Signed, Verified};
use longhaul_protocol::HostId;
use serde::{Deserialize, Serialize};

/// An authorisation as it travels.
pub type SignedAuthorisation = Signed<Authorisation>;
/// A verified authorisation.
pub type VerifiedAuthorisation = Verified<Authorisation>;

/// Separates enrolments from all other signatures.
const PURPOSE: &str = "longhaul realm enrolment";

/// Identifies a token, for the operator's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TokenId(pub [u8; 16]);

/// What the realm's key allows the holder of a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Authorisation {
    /// The realm.
    pub realm: RealmId,
    /// The token.
    pub token: TokenId,
    /// The token's one-time public key.
    pub key: PublicKey,
    /// The name of the host that joins.
    pub name: String,
    /// Its site.
    pub site: String,
    /// What it may do at other hosts.
    pub scope: Scope,
    /// The networks that it may have ports in at once.
    pub networks: Vec<NetworkId>,
    /// When it was signed, in seconds since 1970.
    pub issued_s: u64,
    /// Until when a host can join, in seconds since 1970. Servers hold it.
    pub expires_s: u64,
    /// Until when the host is a member without being in a ruleset, in seconds since 1970. Every
    /// host holds it.
    pub confirm_s: u64,
}

impl Document for Authorisation {
    const PURPOSE: &'static str = "longhaul realm authorisation";
    const NAME: &'static str = "authorisation";
    const BYTES_MAX: usize = AUTHORISATION_BYTES_MAX;

    fn realm(&self) -> RealmId {
        self.realm
    }

    fn check(&self) -> Result<(), DocumentError> {
        let times = || {
            let lives = self.expires_s.checked_sub(self.issued_s);
            let counts = self.confirm_s.checked_sub(self.issued_s);
            let sound = matches!(lives, Some(1..=TOKEN_LIFETIME_S_MAX))
                && matches!(counts, Some(1..=CONFIRM_S_MAX))
                && self.expires_s <= self.confirm_s;
            sound.then_some(()).ok_or_else(|| {
                format!(
                    "a token ends after its issue, at most {TOKEN_LIFETIME_S_MAX} s later, and \
                     its membership not before it, at most {CONFIRM_S_MAX} s after the issue"
                )
            })
        };
        name("host", &self.name)
            .and_then(|()| name("site", &self.site))
            .and_then(|()| limit("networks", self.networks.len(), TOKEN_NETWORKS_MAX))
            .and_then(|()| times())
            .map_err(DocumentError::Content)
    }
}

/// The holder of a token names its host. Not verified.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enrolment {
    /// What the realm allows.
    pub authorisation: SignedAuthorisation,
    /// The host that joins.
    pub host: HostId,
    /// When it joins, in seconds since 1970 by its own clock.
    pub joined_s: u64,
    /// The one-time key's signature of realm, token, host and time.
    pub signature: Signature,
}

/// An enrolment whose two signatures were checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedEnrolment {
    enrolment: Enrolment,
    authorisation: VerifiedAuthorisation,
}

/// Why an enrolment is not accepted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnrolmentError {
    /// The authorisation is not accepted.
    #[error(transparent)]
    Authorisation(#[from] DocumentError),
    /// Not signed by the token's key.
    #[error("the enrolment is not signed by its token: it was changed, or names another host")]
    Signature,
    /// Joined at a time for which the token is not valid.
    #[error("the token could be used until {expires_s} only: ask the operator for another one")]
    Late {
        /// The end of the token, in seconds since 1970.
        expires_s: u64,
    },
}

fn statement(authorisation: &Authorisation, host: HostId, joined_s: u64) -> Vec<u8> {
    [
        &authorisation.realm.0[..],
        &authorisation.token.0,
        &host.0,
        &joined_s.to_le_bytes(),
    ]
    .concat()
}

impl Enrolment {
    /// Names the host that uses a token, with the token's one-time key.
    pub fn new(
        authorisation: &VerifiedAuthorisation,
        key: &SigningKey,
        host: HostId,
        joined_s: u64,
    ) -> Self {
        let statement = statement(authorisation.content(), host, joined_s);
        Self {
            authorisation: authorisation.signed().clone(),
            host,
            joined_s,
            signature: key.sign(PURPOSE, &statement),
        }
    }

    /// Verifies both signatures, the realm, and that the host joined in time by its own word.
    pub fn verify(&self, realm: RealmId) -> Result<VerifiedEnrolment, EnrolmentError> {
        let authorisation = self.authorisation.verify(realm)?;
        let content = authorisation.content();
        let statement = statement(content, self.host, self.joined_s);
        if !content.key.verifies(PURPOSE, &statement, &self.signature) {
            return Err(EnrolmentError::Signature);
        }
        if self.joined_s > content.expires_s {
            return Err(EnrolmentError::Late {
                expires_s: content.expires_s,
            });
        }
        Ok(VerifiedEnrolment {
            enrolment: self.clone(),
            authorisation,
        })
    }
}

impl VerifiedEnrolment {
    /// Returns the enrolment as it travels.
    pub fn enrolment(&self) -> &Enrolment {
        &self.enrolment
    }

    /// Returns the host that joins.
    pub fn host(&self) -> HostId {
        self.enrolment.host
    }

    /// Returns what the realm allows.
    pub fn authorisation(&self) -> &Authorisation {
        self.authorisation.content()
    }

    /// Returns the token.
    pub fn token(&self) -> TokenId {
        self.authorisation().token
    }
}
