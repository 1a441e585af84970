BEGIN TRANSACTION;
CREATE TABLE checkpoint_mark (id INTEGER PRIMARY KEY CHECK (id = 1), number INTEGER NOT NULL) STRICT;
INSERT INTO "checkpoint_mark" VALUES(1,0);
CREATE TABLE held (
        request_id TEXT PRIMARY KEY,
        seq INTEGER NOT NULL,
        tenant_id TEXT NOT NULL,
        reserved_tokens INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
INSERT INTO "held" VALUES('req_4',5,'demo',228);
CREATE TABLE journal (
        seq INTEGER PRIMARY KEY,
        at_us INTEGER NOT NULL,
        kind TEXT NOT NULL CHECK (kind IN ('reserve', 'settle')),
        request_id TEXT NOT NULL,
        body TEXT NOT NULL
    ) STRICT;
INSERT INTO "journal" VALUES(1,1790000000000000,'reserve','req_0','{"request_id":"req_0","tenant_id":"demo","api_key_id":"key_1","user_id":"a\"abort_policy\":","model":"smol","mode":"stream","prompt_tokens_estimated":100,"reserved_tokens":228,"queue_enter_ts":1790000000000000,"trace_id":"00000000000000000000000000000000"}');
INSERT INTO "journal" VALUES(2,1790000000000000,'reserve','req_1','{"request_id":"req_1","tenant_id":"demo","api_key_id":"key_1","model":"smol","mode":"stream","prompt_tokens_estimated":100,"reserved_tokens":228,"queue_enter_ts":1790000000000000,"trace_id":"00000000000000000000000000000000"}');
INSERT INTO "journal" VALUES(3,1790000000000000,'reserve','req_2','{"request_id":"req_2","tenant_id":"demo","api_key_id":"key_1","model":"smol","mode":"stream","prompt_tokens_estimated":100,"reserved_tokens":228,"queue_enter_ts":1790000000000000,"trace_id":"00000000000000000000000000000000"}');
INSERT INTO "journal" VALUES(4,1790000000000000,'reserve','req_3','{"request_id":"req_3","tenant_id":"demo","api_key_id":"key_1","model":"smol","mode":"stream","prompt_tokens_estimated":100,"reserved_tokens":228,"queue_enter_ts":1790000000000000,"trace_id":"00000000000000000000000000000000"}');
INSERT INTO "journal" VALUES(5,1790000000000000,'reserve','req_4','{"request_id":"req_4","tenant_id":"demo","api_key_id":"key_1","model":"smol","mode":"stream","prompt_tokens_estimated":100,"reserved_tokens":228,"queue_enter_ts":1790000000000000,"trace_id":"00000000000000000000000000000000"}');
INSERT INTO "journal" VALUES(6,1790000000000000,'settle','req_0','{"request_id":"req_0","attempt_ids":["att_1","att_2"],"tenant_id":"demo","user_id":"a\"abort_policy\":","api_key_id":"key_1","model":"smol","version":null,"pool":null,"worker_id":null,"gpu_id":null,"adapter":null,"priority":"interactive","mode":"complete","prompt_tokens_estimated":0,"prompt_tokens":90,"prompt_tokens_cached":0,"prompt_tokens_injected":0,"completion_tokens":10,"reserved_tokens":0,"gpu_memory_mb":1.25,"memory_source":"none","kv_byte_seconds":0,"prefill_us":0,"decode_us":0,"queue_enter_ts":1790000000000000,"start_ts":null,"first_token_ts":null,"end_ts":1790000001000000,"latency_us":1000000,"status":200,"outcome":"completed","finish_reason":null,"count_source":"engine","policy_actions":["MASKED"],"price_version":null,"cost":null,"trace_id":""}');
INSERT INTO "journal" VALUES(7,1790000000000000,'settle','req_1','{"request_id":"req_1","attempt_ids":["att_1","att_2"],"tenant_id":"demo","user_id":null,"api_key_id":"key_1","model":"smol","version":null,"pool":null,"worker_id":null,"gpu_id":null,"adapter":null,"priority":"interactive","mode":"complete","prompt_tokens_estimated":0,"prompt_tokens":90,"prompt_tokens_cached":0,"prompt_tokens_injected":0,"completion_tokens":4,"reserved_tokens":0,"gpu_memory_mb":1.25,"memory_source":"none","kv_byte_seconds":0,"prefill_us":0,"decode_us":0,"queue_enter_ts":1790000000000000,"start_ts":null,"first_token_ts":null,"end_ts":1790000001000000,"latency_us":1000000,"status":499,"outcome":"client_closed","finish_reason":null,"count_source":"engine","policy_actions":["MASKED"],"price_version":null,"cost":null,"trace_id":""}');
INSERT INTO "journal" VALUES(8,1790000000000000,'settle','req_2','{"request_id":"req_2","attempt_ids":["att_1","att_2"],"tenant_id":"demo","user_id":null,"api_key_id":"key_1","model":"smol","version":null,"pool":null,"worker_id":null,"gpu_id":null,"adapter":null,"priority":"interactive","mode":"complete","prompt_tokens_estimated":0,"prompt_tokens":0,"prompt_tokens_cached":0,"prompt_tokens_injected":0,"completion_tokens":0,"reserved_tokens":0,"gpu_memory_mb":1.25,"memory_source":"none","kv_byte_seconds":0,"prefill_us":0,"decode_us":0,"queue_enter_ts":1790000000000000,"start_ts":null,"first_token_ts":null,"end_ts":1790000001000000,"latency_us":1000000,"status":429,"outcome":"refused","finish_reason":null,"count_source":"none","policy_actions":["MASKED"],"price_version":null,"cost":null,"trace_id":""}');
INSERT INTO "journal" VALUES(9,1790000000000000,'settle','req_3','{"request_id":"req_3","attempt_ids":["att_1","att_2"],"tenant_id":"demo","user_id":null,"api_key_id":"key_1","model":"smol","version":null,"pool":null,"worker_id":null,"gpu_id":null,"adapter":null,"priority":"interactive","mode":"complete","prompt_tokens_estimated":0,"prompt_tokens":90,"prompt_tokens_cached":0,"prompt_tokens_injected":0,"completion_tokens":10,"reserved_tokens":0,"gpu_memory_mb":1.25,"memory_source":"none","kv_byte_seconds":0,"prefill_us":0,"decode_us":0,"queue_enter_ts":1790000000000000,"start_ts":null,"first_token_ts":null,"end_ts":1790000002000000,"latency_us":1000000,"status":502,"outcome":"worker_lost","finish_reason":null,"count_source":"progress_file","policy_actions":["MASKED"],"price_version":null,"cost":null,"trace_id":""}');
CREATE TABLE operations (
        request_id TEXT NOT NULL PRIMARY KEY,
        attempt_ids TEXT NOT NULL,
        tenant_id TEXT NOT NULL,
        user_id TEXT,
        api_key_id TEXT NOT NULL,
        model TEXT NOT NULL,
        version TEXT,
        pool TEXT,
        worker_id TEXT,
        gpu_id TEXT,
        adapter TEXT,
        priority TEXT NOT NULL,
        mode TEXT NOT NULL,
        prompt_tokens_estimated INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        prompt_tokens_cached INTEGER NOT NULL,
        prompt_tokens_injected INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        reserved_tokens INTEGER NOT NULL,
        gpu_memory_mb REAL NOT NULL,
        memory_source TEXT NOT NULL,
        kv_byte_seconds INTEGER NOT NULL,
        prefill_us INTEGER NOT NULL,
        decode_us INTEGER NOT NULL,
        queue_enter_ts INTEGER NOT NULL,
        start_ts INTEGER,
        first_token_ts INTEGER,
        end_ts INTEGER NOT NULL,
        latency_us INTEGER NOT NULL,
        status INTEGER NOT NULL,
        outcome TEXT NOT NULL,
        finish_reason TEXT,
        count_source TEXT NOT NULL,
        policy_actions TEXT NOT NULL,
        price_version TEXT,
        cost TEXT,
        trace_id TEXT NOT NULL,
        reserve_seq INTEGER NOT NULL,
        settle_seq INTEGER NOT NULL
    ) STRICT;
INSERT INTO "operations" VALUES('req_0','["att_1","att_2"]','demo','a"abort_policy":','key_1','smol',NULL,NULL,NULL,NULL,NULL,'interactive','complete',0,90,0,0,10,0,1.25,'none',0,0,0,1790000000000000,NULL,NULL,1790000001000000,1000000,200,'completed',NULL,'engine','["MASKED"]',NULL,NULL,'',1,6);
INSERT INTO "operations" VALUES('req_1','["att_1","att_2"]','demo',NULL,'key_1','smol',NULL,NULL,NULL,NULL,NULL,'interactive','complete',0,90,0,0,4,0,1.25,'none',0,0,0,1790000000000000,NULL,NULL,1790000001000000,1000000,499,'client_closed',NULL,'engine','["MASKED"]',NULL,NULL,'',2,7);
INSERT INTO "operations" VALUES('req_2','["att_1","att_2"]','demo',NULL,'key_1','smol',NULL,NULL,NULL,NULL,NULL,'interactive','complete',0,0,0,0,0,0,1.25,'none',0,0,0,1790000000000000,NULL,NULL,1790000001000000,1000000,429,'refused',NULL,'none','["MASKED"]',NULL,NULL,'',3,8);
INSERT INTO "operations" VALUES('req_3','["att_1","att_2"]','demo',NULL,'key_1','smol',NULL,NULL,NULL,NULL,NULL,'interactive','complete',0,90,0,0,10,0,1.25,'none',0,0,0,1790000000000000,NULL,NULL,1790000002000000,1000000,502,'worker_lost',NULL,'progress_file','["MASKED"]',NULL,NULL,'',4,9);
CREATE TABLE schema_version (version INTEGER PRIMARY KEY) STRICT;
INSERT INTO "schema_version" VALUES(1);
CREATE TRIGGER journal_no_update BEFORE UPDATE ON journal
        BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
CREATE TRIGGER journal_no_delete BEFORE DELETE ON journal
        BEGIN SELECT RAISE(ABORT, 'the journal is append-only'); END;
CREATE INDEX operations_by_time ON operations (end_ts);
CREATE INDEX operations_by_tenant ON operations (tenant_id, end_ts);
CREATE INDEX operations_by_key ON operations (api_key_id, end_ts);
COMMIT;
