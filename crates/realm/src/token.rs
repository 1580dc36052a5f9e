//! Owns the text of a token, which an operator gives to the owner of a new host:
//! `longhaul host join TOKEN`.
//!
//! A token has all that a new host needs: the realm, where its servers are and how they prove
//! themselves, and the one-time key with the realm's authorisation. It is a secret until it is
//! used.

use crate::enrolment::{Authorisation, Enrolment, SignedAuthorisation, VerifiedAuthorisation};
use crate::key::{RealmId, SEED_BYTES, SigningKey, sha256};
use crate::limits::{SERVERS_MAX, TOKEN_CHARS_MAX};
use crate::ruleset::{ServerEntry, check_server, limit};
use crate::signed::{DocumentError, sign};
use longhaul_protocol::HostId;
use serde::{Deserialize, Serialize};
use std::fmt;

/// What the text of a token begins with. The last digit is the format.
pub const PREFIX: &str = "lhjoin1";
/// Crockford's base 32: digits and letters without i, l, o and u.
const DIGITS: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
const CHECKSUM_BYTES: usize = 4;

/// A token, verified.
#[derive(Clone)]
pub struct Token {
    authorisation: VerifiedAuthorisation,
    seed: [u8; SEED_BYTES],
    servers: Vec<ServerEntry>,
}

#[derive(Serialize, Deserialize)]
struct Content {
    authorisation: SignedAuthorisation,
    seed: [u8; SEED_BYTES],
    servers: Vec<ServerEntry>,
}

/// Why a text is not a token that can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// Something else.
    #[error("this is no token: one begins with `{PREFIX}`; copy the whole line from the operator")]
    NotAToken,
    /// Of a later format.
    #[error("this token is of a later format: update Longhaul on this host")]
    Format,
    /// Longer than any token.
    #[error("a token has at most {TOKEN_CHARS_MAX} characters: copy only the token")]
    TooLong,
    /// A character that no token has.
    #[error(
        "character {at} of the token, `{}`, is in no token: copy it again",
        .character.escape_debug()
    )]
    Character {
        /// Its place, from 1.
        at: usize,
        /// The character.
        character: char,
    },
    /// Cut, or changed somewhere.
    #[error("the token is incomplete or was changed on the way: copy it again, to its end")]
    Damaged,
    /// Complete, but not signed by its realm or against the rules.
    #[error("the token cannot be used: {0}; ask the operator for another one")]
    Document(#[from] DocumentError),
    /// The one-time key is not the authorised one.
    #[error("the token's key is not the one that its realm signed: ask the operator for another")]
    Key,
    /// Its time is over.
    #[error(
        "the token could be used until {expires_s} (seconds since 1970), and it is {unix_s}: check \
         this host's clock, or ask the operator for another one"
    )]
    Expired {
        /// The end.
        expires_s: u64,
        /// The time now.
        unix_s: u64,
    },
}

impl Token {
    /// Makes a token: signs the authorisation with the realm's key.
    ///
    /// `seed` are 32 random bytes. The authorisation's `key` is set to the one of the seed.
    ///
    /// # Errors
    ///
    /// If the authorisation or the list of servers breaks a limit.
    pub fn make(
        mut authorisation: Authorisation,
        seed: [u8; SEED_BYTES],
        servers: Vec<ServerEntry>,
        realm: &SigningKey,
    ) -> Result<Self, TokenError> {
        authorisation.key = SigningKey::from_seed(&seed)
            .ok_or(TokenError::Key)?
            .public();
        check_servers(&servers)?;
        let token = Self {
            authorisation: sign(&authorisation, realm)?,
            seed,
            servers,
        };
        match token.to_text().len() <= TOKEN_CHARS_MAX {
            true => Ok(token),
            false => Err(TokenError::TooLong),
        }
    }

    /// Parses and verifies the text of a token. White space and `-` are ignored; upper case and
    /// the look-alikes `i`, `l` (for 1) and `o` (for 0) are understood.
    ///
    /// The realm is the one that the token names: who has the token trusts the operator.
    pub fn parse(text: &str) -> Result<Self, TokenError> {
        if text.len() > 2 * TOKEN_CHARS_MAX {
            return Err(TokenError::TooLong);
        }
        let skipped = |c: &char| c.is_ascii_whitespace() || *c == '-';
        let text: String = text.chars().filter(|c| !skipped(c)).collect();
        let text = text.to_ascii_lowercase();
        let (name, _) = PREFIX.split_at(PREFIX.len() - 1);
        let Some(digits) = text.strip_prefix(PREFIX) else {
            let later = text.strip_prefix(name).and_then(|rest| rest.chars().next());
            return Err(match later {
                Some('2'..='9') => TokenError::Format,
                _ => TokenError::NotAToken,
            });
        };
        if text.len() > TOKEN_CHARS_MAX {
            return Err(TokenError::TooLong);
        }
        let bytes = from_digits(digits)?;
        let (content, sum) = bytes
            .len()
            .checked_sub(CHECKSUM_BYTES)
            .and_then(|at| bytes.split_at_checked(at))
            .ok_or(TokenError::Damaged)?;
        if checksum(content) != sum {
            return Err(TokenError::Damaged);
        }
        let (content, rest): (Content, _) =
            postcard::take_from_bytes(content).map_err(|_| TokenError::Damaged)?;
        if !rest.is_empty() {
            return Err(TokenError::Damaged);
        }
        check_servers(&content.servers)?;
        let realm = content.authorisation.key.realm();
        let authorisation = content.authorisation.verify(realm)?;
        let key = SigningKey::from_seed(&content.seed).ok_or(TokenError::Key)?;
        if key.public() != authorisation.content().key {
            return Err(TokenError::Key);
        }
        Ok(Self {
            authorisation,
            seed: content.seed,
            servers: content.servers,
        })
    }

    /// Returns the text: one line of [`PREFIX`] and base 32.
    pub fn to_text(&self) -> String {
        let content = Content {
            authorisation: self.authorisation.signed().clone(),
            seed: self.seed,
            servers: self.servers.clone(),
        };
        // Plain data always encodes.
        let mut bytes = postcard::to_stdvec(&content).unwrap_or_default();
        bytes.extend(checksum(&bytes));
        format!("{PREFIX}{}", to_digits(&bytes))
    }

    /// Returns the realm.
    pub fn realm(&self) -> RealmId {
        self.authorisation().realm
    }

    /// Returns what the realm allows.
    pub fn authorisation(&self) -> &Authorisation {
        self.authorisation.content()
    }

    /// Returns the rendezvous servers, with the keys that they must prove.
    pub fn servers(&self) -> &[ServerEntry] {
        &self.servers
    }

    /// Uses the token for a host: this names it, once and for all.
    ///
    /// # Errors
    ///
    /// If the token's time is over.
    pub fn enrol(&self, host: HostId, unix_s: u64) -> Result<Enrolment, TokenError> {
        let expires_s = self.authorisation().expires_s;
        if unix_s > expires_s {
            return Err(TokenError::Expired { expires_s, unix_s });
        }
        let key = SigningKey::from_seed(&self.seed).ok_or(TokenError::Key)?;
        Ok(Enrolment::new(&self.authorisation, &key, host, unix_s))
    }
}

/// Never shows the secret.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Authorisation { token, name, .. } = self.authorisation();
        write!(f, "Token({token:?} for {name})")
    }
}

fn check_servers(servers: &[ServerEntry]) -> Result<(), DocumentError> {
    let some = match servers.is_empty() {
        true => Err("a token names at least one rendezvous server".to_owned()),
        false => limit("servers", servers.len(), SERVERS_MAX),
    };
    some.and_then(|()| servers.iter().try_for_each(check_server))
        .map_err(DocumentError::Content)
}

fn checksum(content: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let [a, b, c, d, ..] = sha256(content);
    [a, b, c, d]
}

fn to_digits(bytes: &[u8]) -> String {
    let mut digits = String::with_capacity(bytes.len() * 8 / 5 + 1);
    let (mut held, mut bits) = (0_u32, 0);
    let digit = |value: u32| char::from(DIGITS[(value & 31) as usize]);
    for byte in bytes {
        held = (held << 8) | u32::from(*byte);
        bits += 8;
        while bits >= 5 {
            bits -= 5;
            digits.push(digit(held >> bits));
        }
        held &= 31;
    }
    if bits > 0 {
        digits.push(digit(held << (5 - bits)));
    }
    digits
}

fn from_digits(text: &str) -> Result<Vec<u8>, TokenError> {
    let mut bytes = Vec::with_capacity(text.len() * 5 / 8);
    let (mut held, mut bits) = (0_u32, 0);
    for (index, character) in text.chars().enumerate() {
        let digit = match character {
            'i' | 'l' => b'1',
            'o' => b'0',
            other => u8::try_from(other).unwrap_or_default(),
        };
        let value = DIGITS.iter().position(|known| *known == digit);
        let value = value.ok_or(TokenError::Character {
            at: PREFIX.len() + index + 1,
            character,
        })?;
        held = (held << 5) | (value as u32);
        bits += 5;
        if bits >= 8 {
            bits -= 8;
            bytes.push((held >> bits) as u8);
            held &= (1 << bits) - 1;
        }
    }
    // The rest of the last digit is padding of less than a digit.
    match held == 0 && bits < 5 {
        true => Ok(bytes),
        false => Err(TokenError::Damaged),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests_common::{NOW_S, id, key, token as authorisation};
    use proptest::prelude::*;

    fn token() -> Token {
        let servers = vec![ServerEntry {
            id: id(200),
            addresses: vec!["rendezvous.example:7400".to_owned()],
        }];
        let authorisation = authorisation(9).content().clone();
        Token::make(authorisation, [9; 32], servers, &key(1)).unwrap()
    }

    #[test]
    fn a_token_survives_its_text_and_what_people_do_to_it() {
        let token = token();
        let text = token.to_text();
        assert!(text.len() < 700, "{}", text.len());
        let wrapped: String = text
            .to_uppercase()
            .replace('0', "O")
            .chars()
            .enumerate()
            .flat_map(|(at, c)| (at % 60 == 59).then_some('\n').into_iter().chain([c]))
            .collect();
        for text in [text.clone(), wrapped, format!("  {text}\r\n")] {
            let parsed = Token::parse(&text).unwrap();
            assert_eq!(parsed.authorisation(), token.authorisation());
            assert_eq!(parsed.servers(), token.servers());
            assert_eq!(parsed.realm(), key(1).public().realm());
        }
        let enrolment = token.enrol(id(50), NOW_S).unwrap();
        assert!(enrolment.verify(token.realm()).is_ok());
        assert!(!format!("{token:?}").contains("seed"));
    }

    #[test]
    fn errors_say_what_to_do() {
        let text = token().to_text();
        let error = |text: &str| Token::parse(text).unwrap_err();
        assert_eq!(error("hello"), TokenError::NotAToken);
        assert_eq!(error("lhjoin2abc"), TokenError::Format);
        assert_eq!(error(&text[..text.len() - 1]), TokenError::Damaged);
        assert_eq!(error(PREFIX), TokenError::Damaged);
        assert_eq!(error(&"0".repeat(9000)), TokenError::TooLong);
        let error_at = error("lhjoin1ab*");
        assert_eq!(
            error_at,
            TokenError::Character {
                at: 10,
                character: '*'
            }
        );
        let late = token().enrol(id(50), NOW_S + 86_401).unwrap_err();
        assert!(late.to_string().contains("ask the operator"), "{late}");
    }

    #[test]
    fn a_changed_character_is_noticed() {
        let text = token().to_text();
        for at in PREFIX.len()..text.len() {
            let mut changed = text.clone().into_bytes();
            changed[at] = if changed[at] == b'7' { b'8' } else { b'7' };
            let changed = String::from_utf8(changed).unwrap();
            assert_eq!(Token::parse(&changed).unwrap_err(), TokenError::Damaged);
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "(lhjoin1)?.{0,80}") {
            let _ = Token::parse(&text);
        }

        #[test]
        fn bytes_survive_their_digits(bytes: Vec<u8>) {
            prop_assert_eq!(from_digits(&to_digits(&bytes)), Ok(bytes));
        }
    }
}
